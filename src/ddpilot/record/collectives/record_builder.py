# SPDX-License-Identifier: Apache-2.0
"""Write the record of a collective that is about to start, and the facts that it refers to.

Most collectives repeat an earlier one, from the same line and with tensors of the same shapes: only number, time and
thread are new. Everything else is built once and cached by a key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from ddpilot.environments.running_frames import main_frame
from ddpilot.record.arguments import (
    MAX_SPLITS,
    alike_tensors,
    count_bytes,
    describe_tensors,
    flags_of,
    number_at,
    tensors_of,
    what_is_alike,
)
from ddpilot.record.call_sites import SiteFinder, Trail, describe_site, find_ddp_model
from ddpilot.record.collectives.ddp_buckets import BucketBook
from ddpilot.record.collectives.operations import Operation
from ddpilot.record.collectives.unfinished_works import Ticket, Usual
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.groups import GroupBook, GroupEntry
from ddpilot.record.flight_ring.writer import RingWriter

MAX_REFS = 20_000
"""Maximum number of cached keys; each takes some hundred bytes."""


class Memory(Protocol):
    """Writes the records of repeated collectives itself, from templates that the `Describer` passes to it."""

    def learn(self, usual: bytes, role: int, group: int, num_bytes: int, tells_failure: bool, /) -> None:
        """Write the next identical collective from this template."""

    def leave_group_out(self) -> None:
        """Leave all collectives of the current group to the `Describer`."""

    def forget(self) -> None:
        """Discard all templates."""


class Describer:
    """Writes records into `ring`. `unbox` converts the source's boxed group to a `ProcessGroup`."""

    def __init__(
        self,
        ring: RingWriter,
        *,
        groups: GroupBook,
        buckets: BucketBook,
        sites: SiteFinder,
        unbox: Callable[[Any], Any],
        memory: Memory | None = None,
    ) -> None:
        self._ring = ring
        self._groups = groups
        self._buckets = buckets
        self._sites = sites
        self._unbox = unbox
        self._memory = memory
        self._main_ident, self._main_id = threading.main_thread().ident, 0

    def thread_id(self) -> int:
        """Return the operating system's id of this thread."""
        # A system call costs 1 us. `Thread.native_id` costs less, but keeps the parent's id after a fork.
        if threading.get_ident() != self._main_ident:
            return threading.get_native_id()
        self._main_id = self._main_id or threading.get_native_id()
        return self._main_id

    def begin_of(self, operation: Operation) -> Callable[[Sequence[Any], FrameType | None, int], Ticket]:
        """Return a function of arguments, frame and start in ns, which writes the record of `operation`.

        It returns the record's ticket.
        """
        operator, group_at, is_p2p = operation.operator, operation.group_at, operation.is_p2p
        list_at, plain_from, reduce_op_at = operation.list_at, operation.plain_from, operation.reduce_op_at
        unbox, find, walk, thread_id = self._unbox, self._groups.find, self._sites.walk, self.thread_id
        callers_of = self._sites.callers
        write, refs, next_seqs, memory = self._ring.begin, self._ring.refs, self._groups.next_seqs, self._memory

        def begin(args: Sequence[Any], frame: FrameType | None, start_ns: int) -> Ticket:
            group = find(unbox(args[group_at]))
            try:
                trail = user, called, ddp, in_reducer = walk(frame)
                if user is None and in_reducer:
                    # The autograd engine runs the backward of an accelerator in its own threads, while the main thread
                    # waits.
                    trail = user, called, _, _ = walk(main_frame())
                code, at = (user.f_code, user.f_lasti) if user is not None else (None, 0)
                callers = callers_of(user)
                led_by = tuple([(id(each.f_code), each.f_lasti) for each in callers]) if callers else ()
                if list_at >= 0 and len(args[list_at]) == 1:  # by far the most frequent case
                    only = args[list_at][0]
                    key = (
                        *(operator, group.number, id(code), at, id(called), led_by),
                        *(only.shape, only.dtype, only.device),
                        *args[plain_from:],
                    )
                else:
                    alike = what_is_alike(operation, args)
                    key = (operator, group.number, id(code), at, id(called), led_by, *alike)
                usual = refs.get(key) or self._make_usual(key, operation, args, group, trail, callers)
                role, is_lasting = 0, True
                if ddp or in_reducer:
                    role, is_lasting = self._role(operation, args, ddp, in_reducer, frame)
                reduce_op = args[reduce_op_at] if reduce_op_at >= 0 else None
                seq = -1 if is_p2p else next_seqs[group.number]
                thread = thread_id()
                index = write(start_ns, seq, thread, role, usual.packed)
                if memory is not None:
                    _teach(memory, usual, role, group, is_lasting)
                if not is_p2p:  # last, so that a collective which Ctrl-C keeps from starting is not counted
                    next_seqs[group.number] = seq + 1
                return index, usual, thread, reduce_op
            except Exception:
                next_seqs[group.number] += not is_p2p  # the other ranks count it
                raise

        return begin

    def _make_usual(
        self,
        key: tuple[Any, ...],
        operation: Operation,
        args: Sequence[Any],
        group: GroupEntry,
        trail: Trail,
        callers: Sequence[FrameType],
    ) -> Usual:
        site = key[2:6]
        if len(self._ring.refs) > MAX_REFS:
            self._ring.forget()
        # Keys contain the `id` of these objects, which must not be reused for others.
        self._ring.refs["kept", site] = (trail[0] and trail[0].f_code, trail[1], *(each.f_code for each in callers))
        inputs, outputs = tensors_of(operation, args)
        splits = [tuple(args[at][:MAX_SPLITS]) for at in operation.splits_at]
        placed = [args[operation.device_at]] if operation.device_at >= 0 else inputs or outputs
        device = placed[0].device.type if placed else ""
        at_any_time = group.may_be_asked(device)
        num_bytes = count_bytes(inputs or outputs)
        flags = flags_of(operation, args)
        packed = layout.USUAL.pack(
            self._refer(operation.operator, operation.describe),
            self._refer(("group", group.number), lambda: group.fact),
            self._refer(("site", *site), lambda: describe_site(trail, callers)),
            self._refer(
                ("tensors", alike_tensors(inputs), alike_tensors(outputs), *splits),
                lambda: describe_tensors(inputs, outputs, splits),
            ),
            number_at(args, operation.root_at),
            number_at(args, operation.peer_at),
            number_at(args, operation.tag_at),
            flags | at_any_time * layout.ASKED_ANY_TIME,
            num_bytes,
        )
        tells_failure = not operation.is_p2p and group.tells_failure(device)
        usual = Usual(
            packed=packed,
            num_bytes=num_bytes,
            group=-1 if operation.is_p2p else group.number,
            at_any_time=at_any_time,
            may_be_captured=not at_any_time and device != "cpu",
            tells_failure=tells_failure,
            is_waited_for=flags == layout.NOT_ASYNC and device == "cpu",
            runs_on_stream=flags == layout.NOT_ASYNC and device != "cpu" and not operation.name.endswith("coalesced"),
        )
        self._ring.refs[key] = usual
        return usual

    def _refer(self, key: Any, make: Callable[[], dict[str, Any]]) -> int:
        ref: int | None = self._ring.refs.get(key)
        if ref is None:
            fact = make()
            ref = self._ring.write_fact(fact) if fact else 0
            self._ring.refs[key] = ref
        return ref

    def _role(
        self, operation: Operation, args: Sequence[Any], ddp: str, in_reducer: bool, frame: FrameType | None
    ) -> tuple[int, bool]:
        # Also returns True if the next identical collective has the same role.
        if in_reducer:
            bucket = self._buckets.match(sum(tensor.numel() for tensor in tensors_of(operation, args)[0]))
            if bucket is not None:
                return self._refer(bucket, lambda: bucket.fact), True
        what = "gradients" if in_reducer else _what_ddp_does(ddp, operation.name)
        name = ""
        is_new_reducer = what in ("construction", "bucket order")
        if is_new_reducer and (model := find_ddp_model(frame)) is not None:
            name = type(model.module).__name__
            known = self._buckets.add(model)
            if what == "bucket order":
                known.hear(args[operation.list_at][0])
        if is_new_reducer and self._memory is not None:
            self._memory.forget()  # its buckets may reuse addresses of earlier ones
        role = self._refer((what, name), lambda: {"what": what, "model": name}) if what else 0
        return role, not in_reducer and not is_new_reducer


def _teach(memory: Memory, usual: Usual, role: int, group: GroupEntry, is_lasting: bool) -> None:
    if not usual.at_any_time:
        memory.leave_group_out()
    elif is_lasting:
        memory.learn(usual.packed, role, group.number, usual.num_bytes, usual.tells_failure)


def _what_ddp_does(function: str, op: str) -> str:
    if function == "__init__":
        return "construction"
    if function == "_pre_forward":
        # After the first backward torch rebuilds the buckets, in C++. Join counts the ranks that have data.
        return "bucket order" if op == "broadcast" else "join"
    if "match" in function or "final" in function or "global_requires" in function:
        return "join"  # run by ranks without more data to match the others' collectives
    return "buffers" if "sync" in function or "broadcast" in function else ""
