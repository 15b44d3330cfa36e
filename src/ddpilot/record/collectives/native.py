# SPDX-License-Identifier: Apache-2.0
"""The compiled recorder in `compiled`: build it for this torch and Python, find it and connect it.

It is optional; `ddpilot build-recorder` builds it. The build takes a C++ compiler, half a minute and torch's headers,
which change with every release, so no wheel could contain it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import make_own_folder, open_own_file
from ddpilot.errors import RecordError
from ddpilot.record import journal
from ddpilot.record.collectives.kernels import NAMESPACE, install_kernels
from ddpilot.record.collectives.operations import Operation
from ddpilot.record.collectives.recorder import Recorder
from ddpilot.record.flight_ring import layout

SOURCES = Path(__file__).parents[1] / "compiled"
MODULE = "ddpilot_repeats"
PYTHON_KEY = "TESTING_ONLY_GenericWrapper"
"""Dispatch key of the Python kernels that the compiled ones call; no tensor and no torch mode ever dispatches to it."""
_NO_WORK, _BUILD_LIMIT_S = -2, 600.0


def built_path() -> Path | None:
    """Return where the build for these sources, torch, Python and machine is or would be; None without a cache folder.

    A relative XDG_CACHE_HOME is ignored, as its specification requires: what is loaded must not depend on the working
    directory.
    """
    import torch

    cache = next(filter(os.path.isabs, [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]), None)
    if cache is None:
        return None

    about = [str(torch.__version__), sys.implementation.cache_tag, sys.abiflags, platform.machine()]
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))]
    digest = hashlib.sha256(b"".join(texts) + "\n".join(about).encode()).hexdigest()[:16]
    return Path(cache) / "ddpilot" / f"recorder-{digest}.so"


def build() -> Path:
    """Compile and load the module, and keep it in this user's cache. Returns its path; reuses an existing build.

    Raises `RecordError` if that fails: not Linux, no compiler, compiler errors, or no writable cache folder.
    """
    path = built_path()
    if path is None:
        raise _failed("it cannot be kept: this user has no home folder", "Let XDG_CACHE_HOME name a folder of yours")
    if path.exists():
        _check_owner(path)
        return path
    if sys.platform != "linux":
        raise _failed(f"this is {sys.platform}, and it is for Linux")
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])), None)
    if compiler is None:
        raise _failed(
            "no C++ compiler: neither $CXX, c++, g++ nor clang++", "Install one (Debian, Ubuntu: apt install g++)"
        )
    try:
        make_own_folder(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(_compile(compiler, Path(folder) / path.name), path)
    except OSError as error:
        raise _failed(f"it cannot be kept there: {error}", "Let XDG_CACHE_HOME name a folder of yours") from error
    return path


def _check_owner(path: Path) -> None:
    try:
        os.close(open_own_file(path, may_be_roots=True))
    except OSError as error:
        raise _failed(str(error), f"Remove {path}, or let XDG_CACHE_HOME name a folder of yours") from error


def _compile(compiler: str, path: Path) -> Path:
    try:
        done = subprocess.run(
            [compiler, *_flags(), "-o", str(path)], capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(f"{compiler} took more than {_BUILD_LIMIT_S:.0f} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise _failed(f"{compiler} says: {'; '.join(errors[:3])}")
    try:
        # The mode set by the compiler depends on the umask, and a group-writable module is not loaded.
        path.chmod(0o700)
        load(path)
    except Exception as error:
        raise _failed(f"what was built cannot be loaded: {error}") from error
    return path


def find(source: str, tell: Callable[[str], None]) -> Any:
    """Load the module if it is built, with `source` as in `start_recording`; None if it is not or cannot be loaded.

    `tell` prints why it cannot be loaded, unless this process has printed that already.
    """
    if source not in ("auto", "native"):
        return None
    try:
        path = built_path()
        return load(path) if path is not None and path.exists() else None
    except Exception as error:  # noqa: BLE001 - guard takes notes in Python
        tell_refused(error, tell)
        return None


_refused: set[str] = set()
"""Reasons that were printed, as both recording and guard load the module."""


def tell_refused(error: Exception, tell: Callable[[str], None]) -> None:
    """Print with `tell` why the module cannot be used, once per process and reason."""
    if str(error) not in _refused:
        _refused.add(str(error))
        tell(f"the compiled part of recording cannot be used, the one in Python is ({error})")


@lru_cache(maxsize=1)  # its types can be registered only once in a process
def load(path: Path) -> Any:
    """Load the module built at `path`. Raises `ImportError` if it was built for a different torch or Python, if a user
    other than this one and root owns `path`, or if others can write to it.
    """
    import torch  # noqa: F401 - loads the libraries that the module links to

    try:
        fd = open_own_file(path, may_be_roots=True)
    except OSError as error:
        raise ImportError(str(error)) from error
    try:
        # By its descriptor, so that the file loaded is the file checked.
        module = _load_from(f"/proc/self/fd/{fd}" if os.path.exists(f"/proc/self/fd/{fd}") else str(path))
    finally:
        os.close(fd)
    module.__file__ = str(path)
    versions, ours = (module.LAYOUT_VERSION, module.JOURNAL_VERSION), (layout.VERSION, journal.VERSION)
    if versions != ours:
        raise ImportError(f"it writes versions {versions} of ring and journal, and these are {ours}")
    return module


def _load_from(place: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, place)
    spec = importlib.util.spec_from_file_location(MODULE, place, loader=loader)
    if spec is None:
        raise ImportError(f"no module at {place}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install_both(
    module: Any, repeats: Any, recorder: Recorder, operations: Mapping[str, Operation]
) -> Callable[[], None]:
    """Register the compiled kernels for `operations`, and the Python kernels that they fall back to.

    Point-to-point operators get Python kernels only, as their calls are seldom alike. Returns a function that removes
    all.
    """
    repeated = {name: operation for name, operation in operations.items() if not operation.is_p2p}
    others = {name: operation for name, operation in operations.items() if operation.is_p2p}
    undo = [install_kernels(recorder, repeated, PYTHON_KEY)]
    try:
        undo.append(install_kernels(recorder, others))
        kernels = module.Kernels(repeats)
        undo.append(kernels.remove)
        for name, operation in repeated.items():
            work_at = _NO_WORK if operation.work_at is None else operation.work_at
            kernels.add(name.removeprefix(f"{NAMESPACE}::"), operation.group_at, operation.reduce_op_at, work_at)
    except BaseException:
        _run_backwards(undo)
        raise
    return lambda: _run_backwards(undo)


def _run_backwards(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop()()


def _flags() -> list[str]:
    import torch
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", abi]
    return [
        *options,
        *(f"-isystem{folder}" for folder in folders),
        str(SOURCES / "module.cpp"),
        *libraries,
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
    ]


def _failed(found: str, fix: str = "") -> RecordError:
    instead = "or leave it: without it collectives are recorded by Python code, which takes longer"
    return RecordError(
        "building the compiled part of recording", found=found, fix=f"{fix}, {instead}" if fix else instead.capitalize()
    )
