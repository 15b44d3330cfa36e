# SPDX-License-Identifier: Apache-2.0
"""Where what lies in the file; docs/flight-ring.md says it in words, and changes together with `VERSION`.

A header, then fixed-size records (one per collective, the oldest overwritten first), then two pages of facts: JSON
objects that records refer to, each written once per page. When a page is full the other one is started over.
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
"""Reads differently on a machine of the other byte order."""

HEADER_BYTES = 4096
RECORD_BYTES = 128
MAX_PAGE_BYTES = 1 << 19
"""A reference has 16 bits for a place within its page, in steps of 8 bytes."""

# magic, version, byte order, bytes of the header, of a record, number of records, bytes of a page, of about, its crc
HEAD = struct.Struct("=8sIIIIIIII")
ABOUT_AT = 256

# Words of 8 bytes that change while the rank runs, by number; words 8 to 31 lie between head and about.
NUM_BEGUN, HEARTBEAT_NS, CLOSED_NS, NUM_FAULTS, FIRST_FAULT, LOST_FACTS, LEFT_NS = range(8, 15)
ENTERING_NS, ASKED_WORLD_SIZE, ASKED_RANK, IS_CLOSED = range(15, 19)

# The first part of a record differs each time, the second is mostly as it was when the same line was last there.
FRESH = struct.Struct("=QQqQI")
USUAL = struct.Struct("=IIIIiiiIQ")
BODY = struct.Struct("=QQqQIIIIIiiiIQ")
WHOLE = struct.Struct(f"={FRESH.size}s{USUAL.size}sI")
"""Both parts and their CRC-32."""
CRC_AT = BODY.size
# Words of a record after its body, by number. Outcome and reduce-op have the record's index in their upper bits: so it
# is known that they are about this record, and not about the one that lay here before.
REDUCE_OP, PENDING_NS, END_NS, OUTCOME = range(10, 14)
DONE, FAILED, UNKNOWN = 1, 2, 3
"""UNKNOWN: it has started, and nobody asks whether it is over."""

ASYNC, NOT_ASYNC, P2P, ASKED_ANY_TIME = 1, 2, 4, 8
NO_NUMBER = -(1 << 31)
"""Stands for no root, peer or tag."""
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED")
"""By the number that torch's `ReduceOp.RedOpType` gives them."""

CRC = struct.Struct("=I")
_FACT = struct.Struct("=II")
_USUAL_FACT_BYTES = 1024
"""Most facts are smaller."""
FACT_START = 8


class Body(NamedTuple):
    """A record as it is before the collective starts. References to facts are 0 where there is none."""

    number: int
    """Counts this rank's records from 1: their index."""
    start_ns: int
    """On CLOCK_MONOTONIC."""
    seq: int
    """Counts this group's collectives from 0; -1 for point-to-point, which is not matched by number."""
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
    """The record that starts `data`; None where it was never or only partly written."""
    packed = data[: BODY.size]
    if CRC.unpack_from(data, CRC_AT)[0] != zlib.crc32(packed):
        return None
    body = Body._make(BODY.unpack(packed))
    return body if body.number else None


def pack_fact(generation: int, fact: dict[str, Any]) -> bytes:
    """A fact as it lies in the page that is in its `generation`-th use, padded to 8 bytes."""
    text = json.dumps(fact, separators=(",", ":")).encode()
    packed = _FACT.pack(len(text), zlib.crc32(text, generation & 0xFFFF)) + text
    return packed + bytes(-len(packed) % 8)


def reference(generation: int, place: int) -> int:
    """What a record holds for the fact at byte `place` of a page in its `generation`-th use."""
    return (generation & 0xFFFF) << 16 | place >> 3


def unpack_fact(read: Callable[[int, int], bytes], page_bytes: int, ref: int) -> dict[str, Any] | None:
    """The fact that `ref` stands for; None where it has been overwritten since.

    `read` gives so many bytes from a place in the pages on, fewer where they end.
    """
    generation, place = ref >> 16, (ref & 0xFFFF) << 3
    if not ref or place + _FACT.size > page_bytes:
        return None
    start, room = generation % 2 * page_bytes + place, page_bytes - place
    piece = read(start, min(_USUAL_FACT_BYTES, room))  # a copy: the writer may be at it
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
