# SPDX-License-Identifier: Apache-2.0
"""Decode records and the facts that they refer to into values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.groups import unpack_ranks
from ddpilot.record.flight_ring.log import Collective, DdpPart, GroupOfRanks, Line, Tensor

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
    return GroupOfRanks(
        name=fact["name"],
        incarnation=fact["incarnation"],
        attempt=fact.get("attempt", 0),
        description=fact.get("desc", ""),
        backend=fact.get("backend", ""),
        size=fact.get("size", 0),
        rank=fact.get("rank", -1),
        ranks=unpack_ranks(fact.get("ranks", "")),
        backend_seq=fact.get("backend_seq"),
    )


def _inputs(fact: dict[str, Any]) -> tuple[Tensor, ...]:
    return _tensors(fact.get("inputs", []))


def _outputs(fact: dict[str, Any]) -> tuple[Tensor, ...]:
    return _tensors(fact.get("outputs", []))


def _tensors(items: list[list[Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(dtype=dtype, shape=tuple(shape), device=device) for dtype, shape, device in items)


def _line(fact: dict[str, Any]) -> Line:
    return Line(**{**fact, "callers": tuple(tuple(each) for each in fact.get("callers", ()))})


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
