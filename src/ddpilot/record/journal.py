# SPDX-License-Identifier: Apache-2.0
"""The journal of a rank: what guard notes there, in a second mapped file beside its ring, read from outside.

A header, then two pages of entries of any size; when a page is full the other one is started over. Free of torch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddpilot.errors import RecordError
from ddpilot.record.forks import ForkGuard
from ddpilot.record.ring import map_file

MAGIC = b"DDPJRNL\n"
VERSION = 1
PAGE_BYTES = 512 * 1024
_HEADER_BYTES = 4096
# magic, version, byte order, bytes of a page, rank, pid
_HEAD = struct.Struct("=8sIIIiQ")
_BYTE_ORDER = 0x01020304
# Words of 8 bytes that change while the rank runs, by number.
_NUM_WRITTEN, _CLOSED_NS = 8, 9
# From here on, for each part of each page: index and place of the first entry that begins in it.
_PARTS_AT, _NUM_PARTS = 16, 32
_PARTS_END = _PARTS_AT + 4 * _NUM_PARTS
_START = struct.Struct("=IIIxxxx")  # mark with the page's generation, bytes of the text, crc of what follows
_WHEN = struct.Struct("=Qq")  # index, time; then the text
_ENTRY_BYTES = _START.size + _WHEN.size
_MARK = 0xDD1A << 16
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One note of a rank."""

    index: int
    """Counts this rank's entries from 1."""
    time_ns: int
    """On the machine's CLOCK_MONOTONIC."""
    kind: str
    values: dict[str, Any]


class Journal(NamedTuple):
    """What a rank's journal held when it was read."""

    rank: int
    pid: int
    entries: tuple[Entry, ...]
    """The newest ones, oldest first."""
    num_lost: int
    """Entries after the index asked for that are not held: overwritten, or too large for a page."""
    closed_ns: int | None
    """When the rank closed it in an orderly way; None while it runs, and where it died."""


class JournalWriter:
    """Creates the file `path` for this user only, replacing what lay there, with two pages of `page_bytes` bytes.

    What is written can be read at once, and after any death of this process. Safe to use from several threads and in
    signal handlers; a forked copy of the process writes nothing. Raises `OSError` where there is no room.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int, page_bytes: int = PAGE_BYTES) -> None:
        if page_bytes < 4096 or page_bytes % 8:
            fix = "Give a multiple of 8 from 4096"
            raise RecordError(f"making the journal {path}", found=f"`page_bytes`={page_bytes}", fix=fix)
        self._fork = ForkGuard()
        self._lock = threading.RLock()  # reentrant: a signal's handler may write while an entry is written
        self._page_bytes = page_bytes
        self._generation = 1
        self._used = 0
        self._index = 0
        self._part = -1
        self._map: mmap.mmap | None = _make(Path(path), page_bytes, rank)
        self._words = memoryview(self._map).cast("Q")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add an entry; one that JSON cannot hold raises, one too large for a page is counted as lost."""
        self.write_encoded(_encode([kind, values]).encode())

    def write_encoded(self, text: bytes) -> None:
        """Add an entry that is JSON already, a list of its kind and its values: for those of every step."""
        if self._fork.is_fork():
            return
        length = _ENTRY_BYTES + len(text) + 7 & ~7
        with self._lock:
            if self._map is None:
                return
            self._index += 1
            index = self._index
            if length <= self._page_bytes:
                if self._used + length > self._page_bytes:
                    self._generation += 1
                    self._used = 0
                at = _HEADER_BYTES + self._generation % 2 * self._page_bytes + self._used
                # Taken before it is written: what a signal's handler writes in between follows it.
                self._used += length
                generation = self._generation & 0xFFFF
                when = _WHEN.pack(index, time.monotonic_ns())
                crc = zlib.crc32(text, zlib.crc32(when, generation))
                packed = _START.pack(_MARK | generation, len(text), crc) + when + text
                self._map[at : at + len(packed)] = packed
                self._mark_part(at - _HEADER_BYTES, index)
            self._words[_NUM_WRITTEN] = self._index

    def _mark_part(self, at: int, index: int) -> None:
        part = at * _NUM_PARTS // self._page_bytes  # counts on through both pages
        if part != self._part:
            self._part = part
            self._words[_PARTS_AT + 2 * part + 1] = at
            self._words[_PARTS_AT + 2 * part] = index

    def close(self) -> None:
        """Say that this rank ended in an orderly way; the file stays. Idempotent."""
        if self._fork.is_fork():
            return
        with self._lock:
            mapped, self._map = self._map, None
            if mapped is not None:
                self._words[_CLOSED_NS] = time.monotonic_ns()
                self._words.release()
                mapped.close()


def read_journal(path: str | os.PathLike[str], after: int = 0) -> Journal:
    """What the journal holds after the entry with the index `after`.

    May be called at any time. Raises `RecordError` where the file is no journal, or one of another version or kind of
    machine; `OSError` where it cannot be read: `FileNotFoundError` until the rank has made it.
    """
    with open(path, "rb", buffering=0) as file:
        head = file.read(_HEADER_BYTES)
        if len(head) < _HEADER_BYTES or not head.startswith(MAGIC):
            raise _refuse(path, f"{len(head)} bytes that start with {head[:8]!r}, which is no journal")
        _, version, order, page_bytes, rank, pid = _HEAD.unpack_from(head)
        words = memoryview(head).cast("Q")
        # Where nothing is new, which is most often so, the pages are not read.
        pages = file.read(2 * page_bytes) if words[_NUM_WRITTEN] > after else b""
    if (version, order) != (VERSION, _BYTE_ORDER) or len(pages) not in (0, 2 * page_bytes):
        raise _refuse(path, f"a journal of version {version}, byte order {order:#x} and {len(pages)} bytes of entries")
    found: dict[int, Entry] = {}
    for at in (0, page_bytes) if pages else ():
        page = pages[at : at + page_bytes]
        found |= {
            entry.index: entry
            for entry in _entries(page, (after, words[_NUM_WRITTEN]), _starts(words, at, page_bytes, after))
        }
    entries = tuple(found[index] for index in sorted(found))
    newest = max(words[_NUM_WRITTEN], entries[-1].index if entries else 0)
    return Journal(rank, pid, entries, max(0, newest - after - len(entries)), words[_CLOSED_NS] or None)


def _starts(words: memoryview, page_at: int, page_bytes: int, after: int) -> list[tuple[int, int]]:
    """Entries of the page, by index and place, behind the last of which all lies that follows `after`."""
    known = zip(words[_PARTS_AT:_PARTS_END:2], words[_PARTS_AT + 1 : _PARTS_END : 2], strict=True)
    return sorted((index, at - page_at) for index, at in known if index <= after and 0 <= at - page_at < page_bytes)


def _entries(page: bytes, between: tuple[int, int], starts: list[tuple[int, int]]) -> Iterator[Entry]:
    after, newest = between
    mark = page[:4]
    (number,) = struct.unpack("=I", mark)
    if number >> 16 != _MARK >> 16:
        return
    # Of a page that was started over, some of them are gone.
    at = next((at for index, at in reversed(starts) if _unpack(page, at, number)[:2] == (True, index)), 0)
    while 0 <= at <= len(page) - _ENTRY_BYTES:
        is_whole, index, end = _unpack(page, at, number)
        if is_whole and index > after:
            start = at + _ENTRY_BYTES
            kind, values = json.loads(page[start:end])
            yield Entry(index, _WHEN.unpack_from(page, at + _START.size)[1], kind, values)
        if is_whole and index >= newest:
            return  # what follows is empty, or older, and takes milliseconds to look through
        # One that is just being written, or whose writing a signal cut short, may have others behind it.
        at = end + 7 & ~7 if is_whole else page.find(mark, at + 8)


def _unpack(page: bytes, at: int, number: int) -> tuple[bool, int, int]:
    """Whether the entry at `at` is whole and of the page's generation, its index, and where its text ends."""
    found, length, crc = _START.unpack_from(page, at)
    start = at + _ENTRY_BYTES
    when = page[at + _START.size : start]
    text = page[start : start + length]
    is_whole = len(text) == length and found == number and zlib.crc32(text, zlib.crc32(when, number & 0xFFFF)) == crc
    return is_whole, _WHEN.unpack(when)[0], start + length


def _make(path: Path, page_bytes: int, rank: int) -> mmap.mmap:
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)  # of a rank that died when it began
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        mapped = map_file(fd, _HEADER_BYTES + 2 * page_bytes)
    except OSError:
        draft.unlink()  # what little there was room for would only fill the disk
        raise
    finally:
        os.close(fd)
    mapped[: _HEAD.size] = _HEAD.pack(MAGIC, VERSION, _BYTE_ORDER, page_bytes, rank, os.getpid())
    os.replace(draft, path)
    return mapped


def _refuse(path: str | os.PathLike[str], found: str) -> RecordError:
    return RecordError(f"reading the journal {os.fspath(path)}", found=found, fix="Name the file that a rank writes")
