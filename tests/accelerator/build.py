# SPDX-License-Identifier: Apache-2.0
"""Compile the emulated accelerator once for these sources, this torch and this Python, and find it again."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
ROOT = Path(__file__).parents[2]
TORCH = "2.13"
"""The torch release whose C++ interface the sources are written against."""
COMPILE_LIMIT_S = 1200.0
OPTIONS = ("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wno-sign-compare", "-Wno-interference-size")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


@functools.cache
def why_not() -> str:
    """Say why the emulated accelerator cannot be built here, or nothing where it can."""
    if not sys.platform.startswith("linux"):
        return "the emulated accelerator runs on Linux only"
    if not version("torch").startswith(TORCH + "."):
        return f"the emulated accelerator is written for torch {TORCH}, and this is {version('torch')}"
    if library_path().exists():
        return ""
    if shutil.which(_compiler()) is None:
        return "the emulated accelerator needs a C++ compiler"
    return ""


def library() -> Path:
    """Compile the sources unless they were compiled before, and return the extension module's file."""
    target = library_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):  # the others wait for the one that compiles
        if not target.exists():
            _compile(target)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def library_path() -> Path:
    """Where the extension module of these sources is, once it is compiled."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for fact in (version("torch"), sys.version, *OPTIONS):
        digest.update(fact.encode() + b"\0")
    return _cache() / f"emu-{digest.hexdigest()[:16]}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("EMU_CACHE") or Path(base) / "ddpilot-tests")


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _compile(target: Path) -> None:
    """Compile all sources as one: torch's headers, which each of them includes, take most of the time."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole, made = Path(folder) / "emu.cpp", Path(folder) / target.name
        whole.write_text("".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
        command = [_compiler(), *OPTIONS, *_places(), str(whole), *LIBRARIES, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode != 0:
            raise RuntimeError(f"the emulated accelerator does not compile:\n{done.stdout}\n{done.stderr[-6000:]}")
        made.replace(target)


def _places() -> list[str]:
    """Where headers and libraries are; errors name sources by paths that do not depend on who compiled them."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    python = sysconfig.get_path("include")
    headers = [python, torch / "include", torch / "include/torch/csrc/api/include"]
    return [
        f"-I{SOURCES}",
        *(f"-isystem{folder}" for folder in headers),
        f"-L{torch / 'lib'}",
        f"-ffile-prefix-map={python}{os.sep}=",
        f"-ffile-prefix-map={ROOT}{os.sep}=",
        f"-ffile-prefix-map={torch.parent}{os.sep}=",  # which may be within the first, and is looked at before it
    ]
