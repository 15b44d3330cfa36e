# SPDX-License-Identifier: Apache-2.0
"""Check the file system of the checkpoint folder: space, a write that is flushed, a rename that replaces."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ddpilot.diagnose.facts import Answers, Facts, in_units
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Severity

_TRIAL_BYTES = 8_000_000
_LITTLE_BYTES = 1_000_000_000


def checkpoint_space(facts: Facts) -> Answers:
    """Free space and files of the checkpoint folder."""
    folder = existing_folder(facts.checkpoint_dir)
    found = os.statvfs(folder)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{folder} ({_file_system(folder)}) has {in_units(free)} free of {in_units(total)}"
    if free < _LITTLE_BYTES or (found.f_files and not found.f_favail):
        severity: Severity = "warning" if free else "error"
        summary = text if found.f_favail or not found.f_files else f"{text} and no inode left"
        yield make_finding("DDP806", summary=summary, severity=severity)
    else:
        yield text


def checkpoint_write(facts: Facts) -> Answers:
    """8 MB written and flushed there."""
    folder = existing_folder(facts.checkpoint_dir)
    try:
        with _scratch(folder) as scratch:
            began = time.monotonic()
            _write(scratch / "data", _TRIAL_BYTES)
            rate = _TRIAL_BYTES / (time.monotonic() - began)
    except OSError as error:
        summary = f"writing {in_units(_TRIAL_BYTES)} to {folder}: {error.strerror or error}"
        yield make_finding("DDP806", summary=summary)
    else:
        yield f"{in_units(rate)}/s written and flushed: about {1e9 / rate:.0f} s for a checkpoint of 1 GB"


def atomic_rename(facts: Facts) -> Answers:
    """A file that replaces another one, and a folder that gets its final name, as every checkpoint does."""
    folder = existing_folder(facts.checkpoint_dir)
    did = "creating a file"
    try:
        with _scratch(folder) as scratch:
            for name in ("old", "new"):
                _write(scratch / name, len(name))
            did = "renaming a file onto another one"
            os.replace(scratch / "new", scratch / "old")
            did = "renaming a folder"
            (scratch / "draft").mkdir()
            os.replace(scratch / "draft", scratch / "final")
            left = sorted(path.name for path in scratch.iterdir())
    except OSError as error:
        yield make_finding("DDP806", summary=f"{did} in {folder}: {error.strerror or error}")
        return
    if left != ["final", "old"]:
        yield make_finding("DDP806", summary=f"after renaming in {folder} there are {', '.join(left)}")
    else:
        yield "a rename replaces a file, and gives a folder its name"


def existing_folder(path: Path) -> Path:
    """`path`, or the folder around it that exists already."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".ddpilot-doctor-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        file.write(os.urandom(num_bytes))
        file.flush()
        os.fsync(file.fileno())


def _file_system(folder: Path) -> str:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in (folder, *folder.parents) if each in mounts), "unknown file system")
