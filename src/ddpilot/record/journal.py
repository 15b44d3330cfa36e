# SPDX-License-Identifier: Apache-2.0
"""The journal of a rank: guard's notes, in a second mapped file next to the ring, read from other processes.

The file has a header, then two pages of entries of any size; when a page is full, the other one is reused. A ring of
fixed-size entries for ordinary steps follows: one is written in each step, with cold caches. Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ddpilot.environments.private_files import open_own_file
from ddpilot.errors import RecordError
from ddpilot.record.flight_ring.layout import as_signed
from ddpilot.record.flight_ring.reader import DAMAGES, Pieces
from ddpilot.record.flight_ring.writer import ForkGuard, create_draft, draft_of, map_file

MAGIC = b"DDPJRNL\n"
VERSION = 2
PAGE_BYTES = 512 * 1024
_HEADER_BYTES = 4096
# magic, version, byte order, page bytes, rank, pid
_HEAD = struct.Struct("=8sIIIiQ")
_BYTE_ORDER = 0x01020304
# Indices of the 8-byte words that change while the rank runs.
_NUM_WRITTEN, _CLOSED_NS, _NUM_STEPS, _END = 8, 9, 10, 11
CLOCK_AHEAD_NS = 13
"""Index of the word that is set in a copy on a different machine, as in the flight ring's layout."""
# From here on, for each part of each page: index and offset of the first entry that starts in it.
_PARTS_AT, _NUM_PARTS = 16, 32
_PARTS_END = _PARTS_AT + 4 * _NUM_PARTS
_START = struct.Struct("=IIIxxxx")  # mark with the page's generation, bytes of the text, CRC-32 of what follows
_WHEN = struct.Struct("=Qq")  # index, time; the text follows
_ENTRY_BYTES = _START.size + _WHEN.size
NUM_STEPS = 4096
"""Maximum number of ordinary steps kept."""
# Index, time, the arguments of `write_step`, and the index again: the entry is incomplete if the two differ.
_STEP = struct.Struct("=QqQqq8sQ")
_MAX_STEP_EVENTS = 8
_MARK = 0xDD1A << 16
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry in a rank's journal."""

    index: int
    """Counts this rank's entries from 1."""
    time_ns: int
    """On CLOCK_MONOTONIC."""
    kind: str
    values: Any
    """A dict with the fields of its kind."""


class Journal(NamedTuple):
    """Contents of a rank's journal at the time of reading."""

    rank: int
    pid: int
    entries: tuple[Entry, ...]
    """The newest entries, oldest first."""
    num_lost: int
    """Entries after the requested index that are missing: overwritten, or too large for a page."""
    closed_ns: int | None
    """Time at which the rank closed the journal normally; None while it runs or if it died."""


class JournalWriter:
    """Creates the file `path`, replacing an existing one, with two pages of `page_bytes` bytes (a multiple of 8).

    Entries can be read at once, and after any death of this process. Safe in several threads and in signal handlers; a
    forked copy of the process writes nothing. Raises `OSError` if there is no space.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int, page_bytes: int = PAGE_BYTES) -> None:
        self._fork = ForkGuard()
        self._lock = threading.RLock()  # reentrant: a signal handler may write while an entry is written
        self._page_bytes = page_bytes
        self._generation = 1
        self._used = 0
        self._next_index: Callable[[], int] = itertools.count(1).__next__  # needs no lock
        self._steps = itertools.count()
        self._steps_at = _HEADER_BYTES + 2 * page_bytes
        self._part = -1
        self._map: mmap.mmap | None = _make(Path(path), page_bytes, rank)
        self._words: memoryview | None = memoryview(self._map).cast("Q")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add an entry. Raises if JSON cannot hold it; one that is too large for a page is counted as lost."""
        text = _encode([kind, values]).encode()
        if self._fork.is_fork():
            return
        length = _ENTRY_BYTES + len(text) + 7 & ~7
        with self._lock:
            if self._map is None or self._words is None:
                return
            index = self._next_index()
            if length <= self._page_bytes:
                if self._used + length > self._page_bytes:
                    self._generation += 1
                    self._used = 0
                at = _HEADER_BYTES + self._generation % 2 * self._page_bytes + self._used
                # Reserved before writing: entries of a signal handler that runs in between follow it.
                self._used += length
                generation = self._generation & 0xFFFF
                when = _WHEN.pack(index, time.monotonic_ns())
                crc = zlib.crc32(text, zlib.crc32(when, generation))
                packed = _START.pack(_MARK | generation, len(text), crc) + when + text
                self._map[at : at + len(packed)] = packed
                self._mark_part(self._words, at, index)
                self._words[_END] = _HEADER_BYTES + self._generation % 2 * self._page_bytes + self._used
            self._words[_NUM_WRITTEN] = index

    def _mark_part(self, words: memoryview, at: int, index: int) -> None:
        part = (at - _HEADER_BYTES) * _NUM_PARTS // self._page_bytes  # counts through both pages
        if part != self._part:
            self._part = part
            words[_PARTS_AT + 2 * part + 1] = at
            words[_PARTS_AT + 2 * part] = index

    def write_step(self, parameter_set: int, step: int, seq: int, events: str) -> None:
        """Add a ``step`` entry with these values, at a fraction of the cost of `write`."""
        if len(events) > _MAX_STEP_EVENTS:
            self.write("step", _step_values(parameter_set, step, seq, events))
            return
        mapped, words = self._map, self._words
        if mapped is None or words is None or self._fork.is_fork():
            return
        index, count = self._next_index(), next(self._steps)
        at = self._steps_at + count % NUM_STEPS * _STEP.size
        now_ns, text = time.monotonic_ns(), events.encode()
        _STEP.pack_into(mapped, at, index, now_ns, parameter_set, step, seq, text, index)
        words[_NUM_STEPS] = count + 1
        words[_NUM_WRITTEN] = index

    def close(self) -> None:
        """Record that this rank ended normally; the file remains. Idempotent."""
        if self._fork.is_fork():
            return
        with self._lock:
            words, self._map, self._words = self._words, None, None
            if words is not None:
                # Unmapped once the last reference is gone: another thread may be about to write a step.
                words[_CLOSED_NS] = time.monotonic_ns()


def read_journal(path: str | os.PathLike[str], after: int = 0) -> Journal:
    """Return the entries of a rank's journal after the index `after`. Not collective.

    May be called at any time. Raises `RecordError` if the file is not a journal, has a different version or byte order,
    or is damaged. Raises `FileNotFoundError` until the rank has created it, and `OSError` if it cannot be read.
    """
    with open(open_own_file(path), "rb", buffering=0) as file:
        try:
            return _read(Pieces(file), path, after)
        except DAMAGES as error:
            raise _refuse(path, f"a damaged journal ({type(error).__name__}: {error})") from error


def _read(pieces: Pieces, path: str | os.PathLike[str], after: int) -> Journal:
    head, size = pieces.read(0, _HEADER_BYTES), pieces.size
    if len(head) < _HEADER_BYTES or not head.startswith(MAGIC):
        raise _refuse(path, f"{len(head)} bytes that start with {head[:8]!r}, which is not a journal")
    _, version, order, page_bytes, rank, pid = _HEAD.unpack_from(head)
    if (version, order, size) != (VERSION, _BYTE_ORDER, _size_of(page_bytes)):
        raise _refuse(path, f"a journal of version {version}, byte order {order:#x} and {size} bytes")
    words = memoryview(head).cast("Q")
    found: dict[int, Entry] = {}
    if words[_NUM_WRITTEN] > after:
        for at in (_HEADER_BYTES, _HEADER_BYTES + page_bytes):
            found |= {entry.index: entry for entry in _entries(pieces, words, (at, page_bytes), after)}
        found |= {entry.index: entry for entry in _read_steps(pieces, words, size, after)}
    entries = tuple(found[index] for index in sorted(found))
    newest = max(words[_NUM_WRITTEN], entries[-1].index if entries else 0)
    closed_ns = words[_CLOSED_NS] or None
    if ahead_ns := as_signed(words[CLOCK_AHEAD_NS]):
        entries = tuple(replace(entry, time_ns=entry.time_ns - ahead_ns) for entry in entries)
        closed_ns = None if closed_ns is None else closed_ns - ahead_ns
    return Journal(rank, pid, entries, max(0, newest - after - len(entries)), closed_ns)


def _entries(pieces: Pieces, words: memoryview, page: tuple[int, int], after: int) -> Iterator[Entry]:
    """Yield the entries after the index `after` in `page`, given as offset and size in bytes."""
    begin, end = page[0], sum(page)
    mark = pieces.read(begin, 4)
    (number,) = struct.unpack("=I", mark)
    if number >> 16 != _MARK >> 16:
        return
    if begin < words[_END] <= end:
        end = words[_END]  # the rest is empty or older, and takes milliseconds to search
    # In a page that was reused, some of these entries have been overwritten.
    known = zip(words[_PARTS_AT:_PARTS_END:2], words[_PARTS_AT + 1 : _PARTS_END : 2], strict=True)
    starts = sorted(((index, at) for index, at in known if index <= after and begin <= at < end), reverse=True)
    first = next((at for index, at in starts if _is_at(pieces, at, end, number, index)), begin)
    data, at = pieces.read(first, end - first), 0
    while 0 <= at <= len(data) - _ENTRY_BYTES:
        is_whole, index, text = _unpack(data, at, number)
        if is_whole and index > after:
            kind, values = json.loads(text)
            yield Entry(index, _WHEN.unpack_from(data, at + _START.size)[1], kind, values)
        # An entry that is incomplete, because it is being written or was interrupted by a signal, may be followed by
        # others.
        at = at + _ENTRY_BYTES + len(text) + 7 & ~7 if is_whole else data.find(mark, at + 8)


def _is_at(pieces: Pieces, at: int, end: int, number: int, index: int) -> bool:
    """True if the entry `index` starts at offset `at`."""
    start = pieces.read(at, _ENTRY_BYTES)
    if len(start) < _ENTRY_BYTES:
        return False
    num_bytes = _ENTRY_BYTES + int(_START.unpack_from(start)[1])
    return at + num_bytes <= end and _unpack(pieces.read(at, num_bytes), 0, number)[:2] == (True, index)


def _unpack(data: bytes, at: int, number: int) -> tuple[bool, int, bytes]:
    """Return whether the entry at `at` is complete and of the page's generation, its index, and its text."""
    found, length, crc = _START.unpack_from(data, at)
    start = at + _ENTRY_BYTES
    when = data[at + _START.size : start]
    text = data[start : start + length]
    is_whole = len(text) == length and found == number and zlib.crc32(text, zlib.crc32(when, number & 0xFFFF)) == crc
    return is_whole, _WHEN.unpack(when)[0], text


def _read_steps(pieces: Pieces, words: memoryview, size: int, after: int) -> Iterator[Entry]:
    """Yield the ordinary steps after the index `after`, newest first."""
    newest = words[_NUM_STEPS]
    for number in range(newest, max(0, newest - NUM_STEPS), -1):
        at = size - (NUM_STEPS - (number - 1) % NUM_STEPS) * _STEP.size
        index, time_ns, parameter_set, step, seq, events, again = _STEP.unpack(pieces.read(at, _STEP.size))
        if index == again:  # otherwise it is being overwritten
            if index <= after:
                return
            values = _step_values(parameter_set, step, seq, events.rstrip(b"\0").decode())
            yield Entry(index, time_ns, "step", values)


def _step_values(parameter_set: int, step: int, seq: int, events: str) -> dict[str, Any]:
    return {"parameter_set": parameter_set, "step": step, "seq": seq, "events": events}


def _size_of(page_bytes: int) -> int:
    return _HEADER_BYTES + 2 * page_bytes + NUM_STEPS * _STEP.size


def _make(path: Path, page_bytes: int, rank: int) -> mmap.mmap:
    fd = create_draft(path)
    try:
        mapped = map_file(fd, _size_of(page_bytes))
    except OSError:
        draft_of(path).unlink()  # what was allocated would only fill the disk
        raise
    finally:
        os.close(fd)
    mapped[: _HEAD.size] = _HEAD.pack(MAGIC, VERSION, _BYTE_ORDER, page_bytes, rank, os.getpid())
    os.replace(draft_of(path), path)
    return mapped


def _refuse(path: str | os.PathLike[str], found: str) -> RecordError:
    return RecordError(f"reading the journal {os.fspath(path)}", found=found, fix="Name the file that a rank writes")
