# SPDX-License-Identifier: Apache-2.0
"""Read a rank's ring from outside, while the rank runs or after it has died. Does not import torch."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from ddpilot.environments.private_files import open_own_file
from ddpilot.errors import RecordError
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.log import CallSite, Collective, DdpPart, GroupOfRanks, RankLog, Tensor, unpack_ranks
from ddpilot.user_files import CodeLine

_FROM_ABOUT = ("rank", "pid", "host", "torch", "started_ns", "started_unix_ns")


def read_ring(path: str | os.PathLike[str], *, after: int = 0, newest: int | None = None) -> RankLog:
    """Return the contents of a ring: all records, or those after the index `after`, or the `newest` ones.

    Not collective, and possible at any time: a record that is just being written is left out and counted in `num_torn`.
    Raises `RecordError` if the file is not a ring, has a different version or byte order, or is truncated or damaged.
    Raises `FileNotFoundError` until the rank has started to record, and `OSError` if the file cannot be read, for
    example because a different user owns it.
    """
    name = os.fspath(path)
    with open(open_own_file(path), "rb", buffering=0) as file:
        try:
            return _read(Pieces(file), name, after, newest)
        except DAMAGES as error:
            raise _refuse(name, f"a damaged flight ring ({type(error).__name__}: {error})", "") from error


def count_begun(path: str | os.PathLike[str]) -> int | None:
    """Return the number of collectives and point-to-point operations in a ring; None if there is no ring."""
    try:
        with open(path, "rb", buffering=0) as ring:
            ring.seek(layout.NUM_BEGUN * 8)
            return int.from_bytes(ring.read(8), "little")
    except OSError:
        return None


def _read(pieces: Pieces, name: str, after: int, newest: int | None) -> RankLog:
    start = memoryview(pieces.read(0, layout.HEADER_BYTES))
    head = _read_head(start, pieces.size, name)
    pages_at = layout.HEADER_BYTES + head.num_records * layout.RECORD_BYTES
    decoder = Decoder(lambda at, num_bytes: pieces.read(pages_at + at, num_bytes), head.page_bytes)
    words = start[: layout.ABOUT_AT].cast("Q")
    if newest is not None:
        after = max(after, words[layout.NUM_BEGUN] - newest)
    collectives = []
    num_torn = 0
    for record in _records(pieces, _slots_after(after, words[layout.NUM_BEGUN], head.num_records)):
        body = layout.unpack_body(record)
        if body is None:
            num_torn += any(record)
        elif body.number > after:
            collectives.append(decoder.decode(body, record.cast("Q")))
    log = RankLog(
        **{name: head.about[name] for name in _FROM_ABOUT},
        heartbeat_ns=words[layout.HEARTBEAT_NS] or None,
        left_ns=words[layout.LEFT_NS] or None,
        entering_ns=words[layout.ENTERING_NS] or None,
        asked_world_size=words[layout.ASKED_WORLD_SIZE],
        asked_rank=words[layout.ASKED_RANK],
        is_closed=bool(words[layout.IS_CLOSED]),
        closed_ns=words[layout.CLOSED_NS] or None,
        num_begun=words[layout.NUM_BEGUN],
        num_torn=num_torn,
        num_faults=words[layout.NUM_FAULTS],
        first_fault=decoder.fact(words[layout.FIRST_FAULT]).get("text", ""),
        collectives=tuple(sorted(collectives, key=lambda collective: collective.index)),
    )
    ahead_ns = layout.as_signed(words[layout.CLOCK_AHEAD_NS])
    return _on_this_clock(log, ahead_ns) if ahead_ns else log


def _on_this_clock(log: RankLog, ahead_ns: int) -> RankLog:
    """Return `log`, a copy of a machine whose clock is `ahead_ns` ahead of this one's, with times of this one's."""

    def shift(time_ns: int | None) -> int | None:
        return None if time_ns is None else time_ns - ahead_ns

    return replace(
        log,
        started_ns=log.started_ns - ahead_ns,
        heartbeat_ns=shift(log.heartbeat_ns),
        left_ns=shift(log.left_ns),
        entering_ns=shift(log.entering_ns),
        closed_ns=shift(log.closed_ns),
        collectives=tuple(
            replace(
                each,
                start_ns=each.start_ns - ahead_ns,
                pending_ns=shift(each.pending_ns),
                end_ns=shift(each.end_ns),
            )
            for each in log.collectives
        ),
    )


def _records(pieces: Pieces, slots: Sequence[range]) -> Iterator[memoryview]:
    for each in slots:
        at, num_bytes = layout.HEADER_BYTES + each.start * layout.RECORD_BYTES, len(each) * layout.RECORD_BYTES
        data = memoryview(pieces.read(at, num_bytes))
        for start in range(0, len(data) - layout.RECORD_BYTES + 1, layout.RECORD_BYTES):
            yield data[start : start + layout.RECORD_BYTES]


class _Head(NamedTuple):
    num_records: int
    page_bytes: int
    about: dict[str, Any]


def _read_head(data: memoryview, size: int, name: str) -> _Head:
    if len(data) < layout.HEADER_BYTES or bytes(data[: len(layout.MAGIC)]) != layout.MAGIC:
        raise _refuse(name, f"{size} bytes that start with {bytes(data[:8])!r}, which is not a flight ring", "")
    _, version, order, header_bytes, record_bytes, num_records, page_bytes, about_bytes, about_crc = (
        layout.HEAD.unpack_from(data)
    )
    if order != layout.BYTE_ORDER:
        raise _refuse(name, "a ring of a machine with a different byte order", "Read it on a machine like that one")
    if version != layout.VERSION:
        found = f"a flight ring of version {version}; this ddpilot reads version {layout.VERSION}"
        raise _refuse(name, found, "Read it with the ddpilot that the ranks ran with")
    num_bytes = layout.HEADER_BYTES + num_records * layout.RECORD_BYTES + 2 * page_bytes
    about = bytes(data[layout.ABOUT_AT :][:about_bytes])
    sizes = (header_bytes, record_bytes)
    if sizes != (layout.HEADER_BYTES, layout.RECORD_BYTES) or zlib.crc32(about) != about_crc:
        raise _refuse(name, "a flight ring with a damaged header", "")
    if size < num_bytes:
        raise _refuse(name, f"{size} bytes of a flight ring of {num_bytes}", "The file is truncated; copy it again")
    return _Head(num_records, page_bytes, json.loads(about))


def _refuse(name: str, found: str, fix: str) -> RecordError:
    return RecordError(f"reading the ring {name}", found=found, fix=fix or "Name the file that a rank records into")


def _slots_after(after: int, num_begun: int, num_records: int) -> Sequence[range]:
    # The writer counts a record after writing it, so there may be one more, or one more per thread.
    newest = num_begun + 8
    if newest - after >= num_records:
        return [range(num_records)]
    if newest <= after:
        return []
    first, last = (after + 1) % num_records, newest % num_records
    return [range(first, last + 1)] if first <= last else [range(first, num_records), range(last + 1)]


DAMAGES = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)
"""Exceptions that decoding damaged bytes can raise."""


class Pieces:
    """The current bytes of an open file, which other processes write and may truncate or damage meanwhile.

    The file is not mapped: access to a mapped page beyond the end of a truncated file ends the process with SIGBUS.
    A read returns fewer bytes at the end of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes from offset `at`."""
        return os.pread(self._file.fileno(), num_bytes, at)


_T = TypeVar("_T")
_STATES: tuple[Literal["begun", "done", "failed", "unknown"], ...] = ("begun", "done", "failed", "unknown")


class Decoder:
    """Decodes the records of one ring. `read(at, num_bytes)` returns bytes of its two pages of facts."""

    def __init__(self, read: Callable[[int, int], bytes], page_bytes: int) -> None:
        self._read = read
        self._page_bytes = page_bytes
        self._facts: dict[int, dict[str, Any]] = {}
        self._values: dict[tuple[Any, int], Any] = {}

    def fact(self, ref: int) -> dict[str, Any]:
        """Return the fact that `ref` refers to; empty if `ref` is 0 or the fact has been overwritten."""
        if ref not in self._facts:
            self._facts[ref] = layout.unpack_fact(self._read, self._page_bytes, ref) or {}
        return self._facts[ref]

    def decode(self, body: layout.Body, words: memoryview) -> Collective:
        """Decode the record `body`; `words` is the whole record as 8-byte words."""
        op, tensors = self.fact(body.op), self.fact(body.tensors)
        index, outcome = divmod(words[layout.OUTCOME], 4)
        state = _STATES[outcome] if index == body.number else "begun"
        pending_ns = words[layout.PENDING_NS]
        return Collective(
            index=body.number,
            op=op.get("op", "?"),
            operator=op.get("operator", "?"),
            group=self._value(_group, body.group),
            seq=body.seq if body.seq >= 0 else None,
            inputs=self._value(_inputs, body.tensors) or (),
            outputs=self._value(_outputs, body.tensors) or (),
            num_inputs=tensors.get("num_inputs", 0),
            num_outputs=tensors.get("num_outputs", 0),
            splits=tuple(tuple(sizes) for sizes in tensors.get("splits", ())),
            num_bytes=body.num_bytes,
            reduce_op=_reduce_op(body.number, words[layout.REDUCE_OP]),
            root=_number(body.root),
            peer=_number(body.peer),
            tag=_number(body.tag),
            is_async=_is_async(body.flags),
            line=self._value(_line, body.site),
            ddp=self._value(_ddp_part, body.role),
            thread=body.thread,
            start_ns=body.start_ns,
            # A time before the start belongs to the record that was overwritten.
            pending_ns=pending_ns if pending_ns >= body.start_ns else None,
            end_ns=words[layout.END_NS] if state in ("done", "failed") else None,
            state=state,
            is_watched=bool(body.flags & layout.ASKED_ANY_TIME),
        )

    def _value(self, make: Callable[[dict[str, Any]], _T], ref: int) -> _T | None:
        fact = self.fact(ref)
        if not fact:
            return None
        if (make, ref) not in self._values:
            self._values[make, ref] = make(fact)
        value: _T = self._values[make, ref]
        return value


def _group(fact: dict[str, Any]) -> GroupOfRanks:
    values = {"description" if name == "desc" else name: value for name, value in fact.items()}
    return GroupOfRanks(**{**values, "ranks": unpack_ranks(fact.get("ranks", ""))})


def _inputs(fact: dict[str, Any]) -> tuple[Tensor, ...]:
    return _tensors(fact.get("inputs", []))


def _outputs(fact: dict[str, Any]) -> tuple[Tensor, ...]:
    return _tensors(fact.get("outputs", []))


def _tensors(items: list[list[Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(dtype=dtype, shape=tuple(shape), device=device) for dtype, shape, device in items)


def _line(fact: dict[str, Any]) -> CallSite:
    return CallSite(**{**fact, "callers": tuple(CodeLine(*each) for each in fact.get("callers", ()))})


def _ddp_part(fact: dict[str, Any]) -> DdpPart:
    return DdpPart(**{**fact, "names": tuple(fact.get("names", ()))})


def _number(value: int) -> int | None:
    return None if value == layout.NO_NUMBER else value


def _is_async(flags: int) -> bool | None:
    return True if flags & layout.ASYNC else False if flags & layout.NOT_ASYNC else None


def _reduce_op(index: int, word: int) -> str | None:
    number = word & 0xFF
    if word >> 8 != index:
        return None
    return layout.REDUCE_OPS[number] if number < len(layout.REDUCE_OPS) else f"reduce-op {number}"


NUM_NEWEST = 64
"""Number of the newest records that show what a rank is doing now."""

_DEFAULT = "0"
"""Name of the default group."""
_FIRST = (0, 1)
"""Attempt and incarnation of a process's first default group. A session's rebuild is a new attempt."""


def read_newest(path: str | os.PathLike[str]) -> RankLog:
    """Read the newest records of the rank that records into `path`. Raises as `read_ring` does."""
    return read_ring(path, newest=NUM_NEWEST)


def find_waiting(log: RankLog) -> Collective | None:
    """Return the newest collective that has started and was not seen to finish; None if there is none.

    Collectives of destroyed groups, such as those before a rebuild, are ignored.
    """
    since_ns = max(log.left_ns or 0, _newest_start_ns(log.collectives))
    entries = reversed(log.collectives)
    return next((entry for entry in entries if entry.state == "begun" and entry.start_ns >= since_ns), None)


def count_begun_in(log: RankLog, group: str) -> int | None:
    """Return how many collectives the rank has started in its newest group of that name; None if `log` has none."""
    return next(
        (
            entry.seq + 1
            for entry in reversed(log.collectives)
            if entry.group is not None and entry.group.name == group and entry.seq is not None
        ),
        None,
    )


def _newest_start_ns(collectives: Sequence[Collective]) -> int:
    """First use of the newest default group if it replaced an earlier one, which was destroyed; otherwise 0."""
    groups = [
        (entry.group.generation, entry.start_ns)
        for entry in collectives
        if entry.group is not None and entry.group.name == _DEFAULT and entry.group.generation > _FIRST
    ]
    newest = max((generation for generation, _ in groups), default=None)
    return min((start_ns for generation, start_ns in groups if generation == newest), default=0)
