# SPDX-License-Identifier: Apache-2.0
"""Layout of the ring file, described in docs/internals/flight-ring.md, which changes together with `VERSION`.

A header, then fixed-size records (one per collective, overwriting the oldest), then two pages of facts: JSON objects
that records refer to, each written once per page. When a page is full, the other one is reused.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

MAGIC = b"DDPRING\n"
VERSION = 1
BYTE_ORDER = 0x01020304
"""Reads differently on a machine with a different byte order."""

HEADER_BYTES = 4096
RECORD_BYTES = 128

# magic, version, byte order, header bytes, record bytes, number of records, page bytes, description bytes, its CRC-32
HEAD = struct.Struct("=8sIIIIIIII")
ABOUT_AT = 256

# Indices of the 8-byte words that change while the rank runs; words 8 to 31 lie between head and description.
NUM_BEGUN, HEARTBEAT_NS, CLOSED_NS, NUM_FAULTS, FIRST_FAULT, LOST_FACTS, LEFT_NS = range(8, 15)
ENTERING_NS, ASKED_WORLD_SIZE, ASKED_RANK, IS_CLOSED, CLOCK_AHEAD_NS = range(15, 20)
"""The last one, signed, is set in a copy on a different machine: what the rank's CLOCK_MONOTONIC is ahead of it."""

# The first part of a record differs each time; the second is mostly the same each time for one line.
FRESH = struct.Struct("=QQqQI")
USUAL = struct.Struct("=IIIIiiiIQ")
BODY = struct.Struct("=QQqQIIIIIiiiIQ")
WHOLE = struct.Struct(f"={FRESH.size}s{USUAL.size}sI")
"""Both parts and their CRC-32."""
CRC_AT = BODY.size
# Indices of a record's words after its body. Outcome and reduce-op hold the record's index in their upper bits, so that
# values of an overwritten record are not taken for this record's.
REDUCE_OP, PENDING_NS, END_NS, OUTCOME = range(10, 14)
DONE, FAILED, UNKNOWN = 1, 2, 3
"""UNKNOWN: started, but not polled for its end."""


def as_signed(word: int) -> int:
    """Return the signed number in an 8-byte word."""
    return word - (1 << 64) if word >> 63 else word


ASYNC, NOT_ASYNC, P2P, ASKED_ANY_TIME = 1, 2, 4, 8
NO_NUMBER = -(1 << 31)
"""Stands for no root, peer or tag."""
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED")
"""By their number in torch's `ReduceOp.RedOpType`."""

CRC = struct.Struct("=I")
_FACT = struct.Struct("=II")
_USUAL_FACT_BYTES = 1024
"""Most facts are smaller."""
FACT_START = 8


class Body(NamedTuple):
    """A record as written before the collective starts. References to facts are 0 if there is no fact."""

    number: int
    """Index of the record: counts this rank's records from 1."""
    start_ns: int
    """On CLOCK_MONOTONIC."""
    seq: int
    """Counts the group's collectives from 0; -1 for point-to-point operations, which are not matched by number."""
    thread: int
    """The operating system's id of the thread."""
    role: int
    op: int
    group: int
    site: int
    tensors: int
    root: int
    peer: int
    tag: int
    flags: int
    num_bytes: int


def unpack_body(data: memoryview) -> Body | None:
    """Unpack the record at the start of `data`; None if it was never or only partly written."""
    packed = data[: BODY.size]
    if CRC.unpack_from(data, CRC_AT)[0] != zlib.crc32(packed):
        return None
    body = Body._make(BODY.unpack(packed))
    return body if body.number else None


def pack_fact(generation: int, fact: dict[str, Any]) -> bytes:
    """Pack a fact for a page in its `generation`-th use, padded to 8 bytes."""
    text = json.dumps(fact, separators=(",", ":")).encode()
    packed = _FACT.pack(len(text), zlib.crc32(text, generation & 0xFFFF)) + text
    return packed + bytes(-len(packed) % 8)


def reference(generation: int, place: int) -> int:
    """Return the reference to the fact at byte `place` of a page in its `generation`-th use.

    It has 16 bits for the place, in steps of 8 bytes: a page has at most 512 KiB.
    """
    return (generation & 0xFFFF) << 16 | place >> 3


def unpack_fact(read: Callable[[int, int], bytes], page_bytes: int, ref: int) -> dict[str, Any] | None:
    """Return the fact that `ref` refers to; None if it has been overwritten.

    `read(at, num_bytes)` returns bytes of the pages, fewer at their end.
    """
    generation, place = ref >> 16, (ref & 0xFFFF) << 3
    if not ref or place + _FACT.size > page_bytes:
        return None
    start, room = generation % 2 * page_bytes + place, page_bytes - place
    piece = read(start, min(_USUAL_FACT_BYTES, room))  # a copy, as the rank may be writing
    if len(piece) < _FACT.size:
        return None
    length, checksum = _FACT.unpack_from(piece)
    if length > len(piece) - _FACT.size:
        piece = read(start, min(_FACT.size + length, room))
    text = piece[_FACT.size : _FACT.size + length]
    if len(text) != length or zlib.crc32(text, generation) != checksum:
        return None
    fact: dict[str, Any] = json.loads(text)
    return fact
