# SPDX-License-Identifier: Apache-2.0
"""Compile the emulated accelerator once for these sources, this torch and this Python, and find it again."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
TORCH = "2.13"
"""The torch release whose C++ interface the sources are written against."""
COMPILE_LIMIT_S = 1200.0


@functools.cache
def why_not() -> str:
    """Say why the emulated accelerator cannot be built here, or nothing where it can."""
    if not sys.platform.startswith("linux"):
        return "the emulated accelerator runs on Linux only"
    if not version("torch").startswith(TORCH + "."):
        return f"the emulated accelerator is written for torch {TORCH}, and this is {version('torch')}"
    if library_path().exists():
        return ""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the emulated accelerator needs a C++ compiler"
    if shutil.which("ninja") is None and not (Path(sys.executable).parent / "ninja").exists():
        return "the emulated accelerator needs ninja"
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
    for fact in (version("torch"), sys.version):
        digest.update(fact.encode() + b"\0")
    return _cache() / f"emu-{digest.hexdigest()[:16]}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("EMU_CACHE") or Path(base) / "ddpilot-tests")


def _compile(target: Path) -> None:
    """Compile in a process of its own: to build an extension imports it, which adds the device to the process."""
    where = hashlib.sha256(f"{SOURCES}\0{version('torch')}\0{sys.version}".encode()).hexdigest()[:16]
    folder = target.parent / f"build-{where}"
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": path}
    environment.setdefault("MAX_JOBS", "3")
    command = [sys.executable, __file__, str(folder), str(target)]
    with _locked(folder.with_suffix(".lock")):
        (folder / "lock").unlink(missing_ok=True)  # torch's own, left by a build that was killed: it would wait forever
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated accelerator does not compile:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def _compile_here(folder: Path, target: Path) -> None:
    from torch.utils import cpp_extension

    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    flags = ["-O1", "-std=c++20", "-Wall", "-Wno-sign-compare", "-Wno-interference-size"]
    cpp_extension.load("emu_C", sources, extra_cflags=flags, build_directory=str(folder), verbose=True)
    part = target.with_suffix(f".{os.getpid()}")
    shutil.copy2(folder / "emu_C.so", part)
    part.replace(target)


if __name__ == "__main__":
    _compile_here(Path(sys.argv[1]), Path(sys.argv[2]))
