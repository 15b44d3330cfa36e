# SPDX-License-Identifier: Apache-2.0
"""Write the ring: a mapped file that is complete at every instruction, so that it can be read after any death."""

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

from ddpilot.environments.own_files import open_own_file
from ddpilot.errors import RecordError
from ddpilot.record import layout

MAX_FACT_BYTES = 32 * 1024

# What every collective passes, looked up once.
_RECORDS_AT, _RECORD_BYTES = layout.HEADER_BYTES, layout.RECORD_BYTES
_NUM_BEGUN, _END_NS, _OUTCOME = layout.NUM_BEGUN, layout.END_NS, layout.OUTCOME
_pack_fresh, _pack_whole_into, _crc = layout.FRESH.pack, layout.WHOLE.pack_into, zlib.crc32


class RingWriter:
    """One process's ring in the open file `fd`, which it sizes, clears and maps, and which may be closed afterwards.

    Nobody can read it before `publish`. Safe to use from several threads. Raises `OSError` where there is no room.
    """

    def __init__(self, fd: int, *, num_records: int, page_bytes: int) -> None:
        self.num_records = num_records
        self.refs: dict[Any, Any] = {}
        """For callers to remember what they wrote, by a key of theirs; emptied when a page is started over."""
        self.next_index: Callable[[], int] = itertools.count(1).__next__
        """Numbers the records; who else writes some shares it."""
        self.on_forget: Callable[[], None] = lambda: None
        """Called when `refs` are emptied: no record may refer any more to what they stood for."""
        self._page_bytes = page_bytes
        self._pages_at = layout.HEADER_BYTES + num_records * layout.RECORD_BYTES
        self._generation = 1
        self._used = layout.FACT_START
        self._lock = threading.RLock()  # reentrant: a signal's handler may run a collective while a fact is written
        self.map = map_file(fd, self._pages_at + 2 * page_bytes)
        """The file, for who else writes records."""
        self._words = memoryview(self.map).cast("Q")

    def publish(self, about: dict[str, Any]) -> None:
        """Write the header, with `about`, what is to be known of the process."""
        text = json.dumps(about).encode()
        if len(text) > layout.HEADER_BYTES - layout.ABOUT_AT:
            raise ValueError(f"{len(text)} bytes about this rank do not fit into the header")
        self.map[layout.ABOUT_AT : layout.ABOUT_AT + len(text)] = text
        sizes = (layout.HEADER_BYTES, layout.RECORD_BYTES, self.num_records, self._page_bytes)
        head = layout.HEAD.pack(layout.MAGIC, layout.VERSION, layout.BYTE_ORDER, *sizes, len(text), zlib.crc32(text))
        # The magic comes last: who sees it sees all of the header.
        self.map[len(layout.MAGIC) : len(head)] = head[len(layout.MAGIC) :]
        self.map[: len(layout.MAGIC)] = layout.MAGIC

    def begin(self, start_ns: int, seq: int, thread: int, role: int, usual: bytes) -> int:
        """Write the record of a collective that is about to start and return its index.

        Fields as in `layout.Body`; `usual` holds those from `op` on, packed as `layout.USUAL`.
        """
        index = self.next_index()
        at = _RECORDS_AT + index % self.num_records * _RECORD_BYTES
        fresh = _pack_fresh(index, start_ns, seq, thread, role)
        # At one go: Python's signal handlers, which may raise, run between two steps.
        _pack_whole_into(self.map, at, fresh, usual, _crc(usual, _crc(fresh)))
        self._words[_NUM_BEGUN] = index
        return index

    def set_reduce_op(self, index: int, number: int) -> None:
        """Add the reduce-op to the record of `index`, unless overwritten."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        if self._words[word] == index:
            self._words[word + layout.REDUCE_OP] = index << 8 | number & 0xFF

    def finish(self, index: int, end_ns: int, outcome: int) -> None:
        """Say in the record of `index`, unless overwritten, how its collective ended, and when."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        words = self._words
        if words[word] == index:
            words[word + _END_NS] = end_ns
            words[word + _OUTCOME] = index << 2 | outcome

    def finish_started_at(self, start_ns: int, thread: int, outcome: int) -> None:
        """`finish` the newest record, if it is of the collective that `thread` began at `start_ns`."""
        num_begun = self._words[_NUM_BEGUN]
        for index in (num_begun, num_begun + 1):  # it may not have been counted yet
            at = _RECORDS_AT + index % self.num_records * _RECORD_BYTES
            body = layout.unpack_body(memoryview(self.map[at : at + _RECORD_BYTES]))
            if body is not None and (body.number, body.start_ns, body.thread) == (index, start_ns, thread):
                self.finish(index, 0, outcome)

    def still_pending(self, index: int, now_ns: int) -> None:
        """Say in the record of `index`, unless overwritten, that its collective was not over at `now_ns`."""
        word = _RECORDS_AT + index % self.num_records * _RECORD_BYTES >> 3
        if self._words[word] == index:
            self._words[word + layout.PENDING_NS] = now_ns

    def write_fact(self, fact: dict[str, Any]) -> int:
        """Write `fact`, which JSON can hold, and return the reference to it."""
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
            self.map[at : at + len(packed)] = packed
            ref = layout.reference(self._generation, self._used)
            self._used += len(packed)
            return ref

    def forget(self) -> None:
        """Write every fact anew from now on."""
        self.refs.clear()
        self.on_forget()

    def note_fault(self, text: str) -> None:
        """Count an error of the recording itself; the first one's `text` is kept."""
        with self._lock:
            self._words[layout.NUM_FAULTS] += 1
            if not self._words[layout.FIRST_FAULT]:
                self._words[layout.FIRST_FAULT] = self.write_fact({"text": text[:2000]})

    def beat(self, now_ns: int) -> None:
        """Say that a Python thread of this process ran at `now_ns`."""
        self._words[layout.HEARTBEAT_NS] = now_ns

    def leave(self, now_ns: int) -> None:
        """Say that this process has left all process groups, at `now_ns`; with 0, that it is in one again."""
        self._words[layout.LEFT_NS] = now_ns

    def enter(self, since_ns: int, world_size: int = 0, rank: int = 0, is_closed: bool = False) -> None:
        """Say that this process has asked for a group since `since_ns`, as `Entering` has it; with 0: not."""
        self._words[layout.ENTERING_NS] = 0
        self._words[layout.ASKED_WORLD_SIZE], self._words[layout.ASKED_RANK] = world_size, rank
        self._words[layout.IS_CLOSED] = is_closed
        self._words[layout.ENTERING_NS] = since_ns  # last: who sees it sees the others

    def close(self, now_ns: int) -> None:
        """Say that the recording ended in an orderly way, and unmap the file."""
        self._words[layout.CLOSED_NS] = now_ns
        self._words.release()
        self.map.close()


def map_file(fd: int, num_bytes: int) -> mmap.mmap:
    """The open file `fd`, sized, cleared and mapped. Raises `OSError` where there is no room for it."""
    os.ftruncate(fd, 0)
    _allocate(fd, num_bytes)
    mapped = mmap.mmap(fd, num_bytes)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        mapped[page] = 0  # the first write to a page takes as long as several collectives: now rather than then
    return mapped


def _allocate(fd: int, num_bytes: int) -> None:
    # A sparse file would be mapped as well, and the first write without room would end the rank with SIGBUS.
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
    """Where the ring lies that will be moved to `path` as soon as it can be read."""
    return path.with_name(f"{path.name}.new")


def open_draft(path: Path) -> int:
    """Create the file for the ring that will be moved to `path`, for this user only, and return its descriptor.

    Raises `RecordError` where something that is no ring lies at `path`; `OSError` where the file cannot be created, and
    where a file of another user lies at `path`.
    """
    with suppress(FileNotFoundError), open(open_own_file(path), "rb") as found:
        start = found.read(len(layout.MAGIC))
        if start not in (layout.MAGIC, b""):
            raise RecordError(
                f"starting to record into {path}",
                found=f"a file that is no flight ring: it starts with {start!r}",
                fix="Name a file that does not exist, or remove this one if nobody needs it",
            )
    draft = draft_of(path)
    draft.unlink(missing_ok=True)  # of a rank that died when it began
    return os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
