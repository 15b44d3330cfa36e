# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes: checksums, fsync and rename, so that after a crash a file is either old or new."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 24
"""Number of bytes hashed and written at a time."""
_LOCK = ".lock"
_NEW = ".new"
"""Suffix of files and directories that a process creates and renames immediately."""
TOKEN = "[0-9a-f]{8}"
"""Regular expression of the token in names of files and directories that are renamed or removed later."""
_EARLIER_PREFIX = "earlier-"


@dataclass(frozen=True)
class FileFacts:
    """The expected size of a file in bytes, and the SHA-256 of its contents in hexadecimal."""

    num_bytes: int
    sha256: str


class HashingFile:
    """A new binary file that counts and hashes its bytes; on disk after the `with` block ended without error."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self.error: OSError | None = None
        """The first error: `torch.save` raises a consequence of it instead."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its size in bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                self._write_chunk(view[start : start + CHUNK_BYTES])
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def _write_chunk(self, chunk: memoryview) -> None:
        self._hash.update(chunk)
        self._num_bytes += len(chunk)
        while chunk:
            chunk = chunk[self._file.write(chunk) or 0 :]

    def flush(self) -> None:
        """Do nothing: writes are unbuffered, but `torch.save` calls it."""

    @property
    def facts(self) -> FileFacts:
        """Size and checksum of the bytes written so far."""
        return FileFacts(self._num_bytes, self._hash.hexdigest())

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())


def read_facts(path: Path) -> FileFacts:
    """Return size and checksum of the file at `path`. Raises OSError if it cannot be read."""
    summed, num_bytes = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            summed.update(chunk)
            num_bytes += len(chunk)
    return FileFacts(num_bytes, summed.hexdigest())


def sync_folder(folder: Path) -> None:
    """Call fsync on `folder`: a rename in it is durable only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace the contents of `path` by `text` atomically: readers get the old or the new text, also after a crash."""
    new = path.parent / f".{path.name}.{secrets.token_hex(4)}{_NEW}"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def probe(folder: Path) -> None:
    """Create `folder` if it does not exist, and write and remove a file in it. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as file:
        file.write(b"can this be written?")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staging(folder: Path, prefix: str) -> Iterator[Path]:
    """Create a directory in `folder`, named `prefix` and a token; remove it if the block raises.

    `remove_stale` skips it while it is locked. The kernel releases the lock when the process ends, however it ends.
    """
    token = secrets.token_hex(4)
    made = folder / f".{token}{_NEW}"  # `remove_stale` skips this name: it must not find the directory unlocked
    made.mkdir()
    try:
        with open(made / _LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = made.rename(folder / f"{prefix}{token}")
            yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def publish(staged: Path, name: str) -> Path:
    """Rename a finished staging directory to `name`, atomically, and return its path. Raises OSError if it exists."""
    sync_folder(staged)
    target = staged.parent / name
    os.rename(staged, target)
    (target / _LOCK).unlink()  # not earlier: `remove_stale` would delete an unlocked staging directory
    sync_folder(target.parent)
    return target


def remove_stale(folder: Path, name: re.Pattern[str]) -> None:
    """Delete the directories in `folder` whose whole name matches `name`, unless a live process is writing them."""
    for path in folder.iterdir():
        if name.fullmatch(path.name) and path.is_dir() and not is_locked(path / _LOCK):
            shutil.rmtree(path, ignore_errors=True)


def move_aside(folder: Path, names: Iterable[str]) -> Path:
    """Move the entries `names` of `folder`, in this order, to a new directory in it, and return its path.

    Names that do not exist are skipped. Raises OSError if a move fails.
    """
    number = 1 + sum(path.name.startswith(_EARLIER_PREFIX) for path in folder.iterdir())
    while (earlier := folder / f"{_EARLIER_PREFIX}{number}").exists():
        number += 1
    earlier.mkdir()
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(earlier / name)
    return earlier


def is_locked(path: Path) -> bool:
    """Return True if another process holds the lock of the file `path`."""
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def remove_new(folder: Path) -> None:
    """Delete what `staging` and `replace_text` left in a killed process; called while no other process may write."""
    is_new = re.compile(rf"\.(.+\.)?{TOKEN}{re.escape(_NEW)}").fullmatch
    for path in folder.iterdir():
        if is_new(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
