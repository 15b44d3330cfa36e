# SPDX-License-Identifier: Apache-2.0
"""Write the ring: a mapped file that is consistent after every instruction, so it can be read after any death."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import open_own_file
from ddpilot.errors import RecordError
from ddpilot.record.flight_ring import layout

MAX_FACT_BYTES = 32 * 1024

# Used by every collective, so looked up once.
_RECORDS_AT, _RECORD_BYTES = layout.HEADER_BYTES, layout.RECORD_BYTES
_NUM_BEGUN, _END_NS, _OUTCOME = layout.NUM_BEGUN, layout.END_NS, layout.OUTCOME
_pack_fresh, _pack_whole_into, _crc = layout.FRESH.pack, layout.WHOLE.pack_into, zlib.crc32


class RingWriter:
    """Writes one process's ring into the open file `fd`, which it sizes, clears and maps; `fd` may then be closed.

    The file cannot be read before `publish`. Thread-safe. Raises `OSError` if there is no space.
    """

    def __init__(self, fd: int, *, num_records: int, page_bytes: int) -> None:
        self.num_records = num_records
        self.refs: dict[Any, Any] = {}
        """Cache for callers, from a key of theirs to what they have written; cleared when a page is reused."""
        self._next_index: Callable[[], int] = itertools.count(1).__next__
        self._page_bytes = page_bytes
        self._pages_at = layout.HEADER_BYTES + num_records * layout.RECORD_BYTES
        self._generation = 1
        self._used = layout.FACT_START
        self._lock = threading.RLock()  # reentrant: a signal handler may run a collective while a fact is written
        self._map = map_file(fd, self._pages_at + 2 * page_bytes)
        self._words = memoryview(self._map).cast("Q")

    def publish(self, about: dict[str, Any]) -> None:
        """Write the header with `about`, the description of this process."""
        text = json.dumps(about).encode()
        if len(text) > layout.HEADER_BYTES - layout.ABOUT_AT:
            raise ValueError(f"{len(text)} bytes about this rank do not fit into the header")
        self._map[layout.ABOUT_AT : layout.ABOUT_AT + len(text)] = text
        sizes = (layout.HEADER_BYTES, layout.RECORD_BYTES, self.num_records, self._page_bytes)
        head = layout.HEAD.pack(layout.MAGIC, layout.VERSION, layout.BYTE_ORDER, *sizes, len(text), zlib.crc32(text))
        # The magic comes last: a reader that sees it sees all of the header.
        self._map[len(layout.MAGIC) : len(head)] = head[len(layout.MAGIC) :]
        self._map[: len(layout.MAGIC)] = layout.MAGIC

    def begin(self, start_ns: int, seq: int, thread: int, role: int, usual: bytes) -> int:
        """Write the record of a collective that is about to start, and return its index.

        For the fields see `layout.Body`. `usual` holds the fields from `op` on, packed as `layout.USUAL`.
        """
        index = self._next_index()
        at = _RECORDS_AT + index % self.num_records * _RECORD_BYTES
        fresh = _pack_fresh(index, start_ns, seq, thread, role)
        # In one step: Python's signal handlers, which may raise, run between two steps.
        _pack_whole_into(self._map, at, fresh, usual, _crc(usual, _crc(fresh)))
        self._words[_NUM_BEGUN] = index
        return index

    def set_reduce_op(self, index: int, number: int) -> None:
        """Add the reduce-op to the record `index`, unless it has been overwritten."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        if self._words[word] == index:
            self._words[word + layout.REDUCE_OP] = index << 8 | number & 0xFF

    def finish(self, index: int, end_ns: int, outcome: int) -> None:
        """Write to the record `index`, unless it has been overwritten, the time and outcome of its collective."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        words = self._words
        if words[word] == index:
            words[word + _END_NS] = end_ns
            words[word + _OUTCOME] = index << 2 | outcome

    def finish_started_at(self, start_ns: int, thread: int, outcome: int) -> None:
        """Finish the newest record if it belongs to the collective that `thread` started at `start_ns`."""
        num_begun = self._words[_NUM_BEGUN]
        for index in (num_begun, num_begun + 1):  # the newest record may not have been counted yet
            at = _RECORDS_AT + index % self.num_records * _RECORD_BYTES
            body = layout.unpack_body(memoryview(self._map[at : at + _RECORD_BYTES]))
            if body is not None and (body.number, body.start_ns, body.thread) == (index, start_ns, thread):
                self.finish(index, 0, outcome)

    def still_pending(self, index: int, now_ns: int) -> None:
        """Write to the record `index`, unless it has been overwritten, that its collective was pending at `now_ns`."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        if self._words[word] == index:
            self._words[word + layout.PENDING_NS] = now_ns

    def write_fact(self, fact: dict[str, Any]) -> int:
        """Write `fact`, which must be JSON-serializable, and return the reference to it; 0 if it is too large."""
        with self._lock:
            packed = layout.pack_fact(self._generation, fact)
            if len(packed) > min(MAX_FACT_BYTES, self._page_bytes - layout.FACT_START):
                self._words[layout.LOST_FACTS] += 1
                return 0
            if self._used + len(packed) > self._page_bytes:
                self._generation += 1
                self._used = layout.FACT_START
                self.forget()
                packed = layout.pack_fact(self._generation, fact)
            at = self._pages_at + self._generation % 2 * self._page_bytes + self._used
            self._map[at : at + len(packed)] = packed
            ref = layout.reference(self._generation, self._used)
            self._used += len(packed)
            return ref

    def forget(self) -> None:
        """Clear `refs`, so that every fact is written again."""
        self.refs.clear()

    def note_fault(self, text: str) -> None:
        """Count an error of the recording itself, and keep the `text` of the first one."""
        with self._lock:
            self._words[layout.NUM_FAULTS] += 1
            if not self._words[layout.FIRST_FAULT]:
                self._words[layout.FIRST_FAULT] = self.write_fact({"text": text[:2000]})

    def beat(self, now_ns: int) -> None:
        """Record that a Python thread of this process ran at `now_ns`."""
        self._words[layout.HEARTBEAT_NS] = now_ns

    def leave(self, now_ns: int) -> None:
        """Record that this process left all process groups at `now_ns`; with 0, that it is in one again."""
        self._words[layout.LEFT_NS] = now_ns

    def enter(self, since_ns: int, world_size: int = 0, rank: int = 0, is_closed: bool = False) -> None:
        """Record that this process has been in init_process_group since `since_ns`, see `PendingInit`; 0: it is not."""
        self._words[layout.ENTERING_NS] = 0
        self._words[layout.ASKED_WORLD_SIZE], self._words[layout.ASKED_RANK] = world_size, rank
        self._words[layout.IS_CLOSED] = is_closed
        self._words[layout.ENTERING_NS] = since_ns  # last: the other values are valid once it is set

    def close(self, now_ns: int) -> None:
        """Record that the recording ended normally, and unmap the file."""
        self._words[layout.CLOSED_NS] = now_ns
        self._words.release()
        self._map.close()


def map_file(fd: int, num_bytes: int) -> mmap.mmap:
    """Size, clear and map the open file `fd`. Raises `OSError` if there is no space."""
    os.ftruncate(fd, 0)
    _allocate(fd, num_bytes)
    mapped = mmap.mmap(fd, num_bytes)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        mapped[page] = 0  # the first write to a page costs as much as several collectives, so it is done now
    return mapped


def _allocate(fd: int, num_bytes: int) -> None:
    # A sparse file could be mapped too, but the first write without space on disk would end the rank with SIGBUS.
    if sys.platform == "linux":
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    with open(fd, "wb", closefd=False) as file:
        file.write(bytes(num_bytes))


def draft_of(path: Path) -> Path:
    """Return the path of the file that is moved to `path` once it is readable."""
    return path.with_name(f"{path.name}.new")


def open_draft(path: Path) -> int:
    """Create the draft of the ring at `path`, with access for this user only, and return its file descriptor.

    Raises `RecordError` if `path` exists and is not a ring; `OSError` if the draft cannot be created, or if `path`
    belongs to a different user.
    """
    with suppress(FileNotFoundError), open(open_own_file(path), "rb") as found:
        start = found.read(len(layout.MAGIC))
        if start not in (layout.MAGIC, b""):
            raise RecordError(
                f"starting to record into {path}",
                found=f"a file that is not a flight ring: it starts with {start!r}",
                fix="Name a file that does not exist, or remove this one if it is not needed",
            )
    return create_draft(path)


def create_draft(path: Path) -> int:
    """Create the draft of `path`, with access for this user only, and return its file descriptor."""
    draft = draft_of(path)
    draft.unlink(missing_ok=True)  # from a rank that died at start
    return os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


_MADV_WIPEONFORK = 18  # Linux 4.14; not in the mmap module


class ForkGuard:
    """Remembers the process that created it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.mark = _make_mark()
        """A page that reads as zero in a forked process; None if the system does not support that."""

    def is_fork(self) -> bool:
        """True if this process was forked since, also by C code without Python's knowledge."""
        # A system call costs 2 us within a collective, reading memory almost nothing.
        if self.mark is not None:
            return not self.mark[0]
        return os.getpid() != self._pid


def _make_mark() -> mmap.mmap | None:
    if sys.platform != "linux":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_MADV_WIPEONFORK)
    except OSError:
        page.close()
        return None
    page[0] = 1
    return page
