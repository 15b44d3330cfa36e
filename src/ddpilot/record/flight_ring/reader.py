# SPDX-License-Identifier: Apache-2.0
"""Read a rank's ring from outside, while the rank runs or after it has died. Does not import torch."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddpilot.environments.private_files import open_own_file
from ddpilot.errors import RecordError
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.decoder import Decoder
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.pieces import DAMAGES, Pieces

_FROM_ABOUT = ("rank", "pid", "host", "torch", "source", "started_ns", "started_unix_ns")


def read_ring(path: str | os.PathLike[str], *, after: int = 0, newest: int | None = None) -> RankLog:
    """Return the contents of a ring: all records, or those after the index `after`, or the `newest` ones.

    May be called at any time: a record that is just being written is left out and counted in `num_torn`. Raises
    `RecordError` if the file is not a ring, has a different version or byte order, or is truncated or damaged;
    `OSError` if it cannot be read, also because a different user owns it: `FileNotFoundError` until the rank has
    started to record.
    """
    name = os.fspath(path)
    with open(open_own_file(path), "rb", buffering=0) as file:
        try:
            return _read(Pieces(file), name, after, newest)
        except DAMAGES as error:
            raise _refuse(name, f"a damaged flight ring ({type(error).__name__}: {error})", "") from error


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
    return RankLog(
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
        raise _refuse(name, f"{size} bytes that start with {bytes(data[:8])!r}, which is no flight ring", "")
    _, version, order, header_bytes, record_bytes, num_records, page_bytes, about_bytes, about_crc = (
        layout.HEAD.unpack_from(data)
    )
    if order != layout.BYTE_ORDER:
        raise _refuse(name, "a ring of a machine with the other byte order", "Read it on a machine like that one")
    if version != layout.VERSION:
        found = f"a flight ring of version {version}; this ddpilot reads version {layout.VERSION}"
        raise _refuse(name, found, "Read it with the ddpilot that the ranks ran with")
    num_bytes = layout.HEADER_BYTES + num_records * layout.RECORD_BYTES + 2 * page_bytes
    about = bytes(data[layout.ABOUT_AT :][:about_bytes])
    sizes = (header_bytes, record_bytes)
    if sizes != (layout.HEADER_BYTES, layout.RECORD_BYTES) or zlib.crc32(about) != about_crc:
        raise _refuse(name, "a flight ring with a damaged header", "")
    if size < num_bytes:
        raise _refuse(name, f"{size} bytes of a flight ring of {num_bytes}", "The file was cut off; copy it again")
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
