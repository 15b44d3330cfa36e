# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes, by one process or several: after a crash a file or checkpoint is either old or new.

Files have checksums, and are synchronized before they are renamed. Ranks that write files of one checkpoint in the
background exchange files in the staging directory instead of messages, since a thread must not call collectives, which
would be out of order with those of the training. A rank holds a lock while it writes, which the kernel releases when
the rank dies: rank 0 then gives the checkpoint up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pickle
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


SHARDS_FILE = ".metadata"
"""Index of the files of shards, as torch.distributed.checkpoint names it."""
_SHARD_FILE = re.compile(r"__(\d+)_\d+\.distcp")
"""Names of the files of shards, with the rank."""
_POLL_S = 0.02

Written = tuple[dict[str, FileFacts], Any]
"""Facts of the files that a rank has written, and what the rank that commits them needs."""


def shard_owner(file: str) -> int | None:
    """Return the rank that wrote the file of shards called `file`; None for other files."""
    match = _SHARD_FILE.fullmatch(file)
    return None if match is None else int(match[1])


def call_in_background(task: Callable[[], None]) -> Future[None]:
    """Run `task` in a thread that ends with it; the interpreter waits for the thread at exit."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="ddpilot-checkpoint")
    future = executor.submit(task)
    executor.shutdown(wait=False)
    return future


class RankWrite:
    """The files of `rank`, which does not commit, in the staging directory `folder`.

    Creating one locks it: rank 0 waits from then on for `run`, or the end of this process. Raises OSError.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._lock = open(_lock(folder, rank), "xb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def start(self, write: Callable[[], Written]) -> Future[None]:
        """Call `run` in a thread, which the interpreter waits for at exit."""
        return call_in_background(lambda: self.run(write))

    def run(self, write: Callable[[], Written]) -> None:
        """Call `write` and leave its result, or its error, to rank 0. Its files are deleted after an error."""
        before = set(self._folder.iterdir())
        outcome: dict[str, Any]
        try:
            files, results = write()
            outcome = {"files": files, "results": results}
        except Exception as error:  # noqa: BLE001  (rank 0 raises it)
            text = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            outcome = {"error": text or str(error), "errno": getattr(error, "errno", None)}
            self._remove_own(before)  # on a full disk, this makes room for the outcome
        done = _done(self._folder, self._rank)
        with suppress(OSError):  # without it, rank 0 finds the lock released
            new = done.with_suffix(".new")
            with open(new, "wb") as file:
                pickle.dump(outcome, file)
            os.replace(new, done)
        self.release()

    def release(self) -> None:
        """End the write. Forked processes may have the file, too: closing it would not release the lock."""
        with suppress(OSError, ValueError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()

    def _remove_own(self, before: set[Path]) -> None:
        with suppress(OSError):
            for path in set(self._folder.glob(f"__{self._rank}_*")) - before:
                path.unlink(missing_ok=True)


def collect(folder: Path, num_ranks: int, load: Callable[[Any], Any]) -> Iterator[Written]:
    """Yield what each of the ranks 1 to `num_ranks` - 1 has written into `folder`, once it has; remove its notes.

    `load`: reads a note from an open file. Raises OSError with the rank if it failed or died.
    """
    for rank in range(1, num_ranks):
        outcome = _wait(folder, rank, load)
        if outcome is None:
            raise OSError(errno.EIO, f"rank {rank} ended while it wrote its shards, or could not report an error")
        if "error" in outcome:
            if outcome["errno"] is None:
                raise RuntimeError(f"rank {rank}: {outcome['error']}")
            raise OSError(outcome["errno"], f"rank {rank}: {outcome['error']}")
        yield outcome["files"], outcome["results"]
        _done(folder, rank).unlink()
        _lock(folder, rank).unlink()


def _wait(folder: Path, rank: int, load: Callable[[Any], Any]) -> dict[str, Any] | None:
    while True:
        is_writing = is_locked(_lock(folder, rank))  # before the look: the note is written under the lock
        with suppress(FileNotFoundError), open(_done(folder, rank), "rb") as file:
            return dict(load(file))
        if not is_writing:
            return None
        time.sleep(_POLL_S)


def _lock(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.lock"


def _done(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.done"
