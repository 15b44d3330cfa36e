# SPDX-License-Identifier: Apache-2.0
"""Ranks write files of one checkpoint, each in the background: rank 0 commits it once all of them have finished.

Ranks exchange files in the staging directory instead of messages, since a thread must not call collectives, which would
be out of order with those of the training. A rank holds a lock while it writes, which the kernel releases when the rank
dies: rank 0 then gives the checkpoint up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpilot.checkpoint.atomic_files import FileFacts, is_locked

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


class RankWrite:
    """What rank `rank`, which does not commit, writes into the staging directory `folder`.

    Creating one locks it: rank 0 waits from then on for `run`, or the end of this process. Raises OSError.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._lock = open(_lock(folder, rank), "xb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def start(self, write: Callable[[], Written]) -> Future[None]:
        """Call `run` in a thread, which the interpreter waits for at exit."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="ddpilot-checkpoint")
        future = executor.submit(self.run, write)
        executor.shutdown(wait=False)
        return future

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
