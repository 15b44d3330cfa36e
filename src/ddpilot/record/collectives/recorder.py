# SPDX-License-Identifier: Apache-2.0
"""Write the record of each collective; an error in recording never stops training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ddpilot.environments.interpreter import main_frame
from ddpilot.record.call_sites import CallPath, SiteFinder, describe_site, find_ddp_model
from ddpilot.record.collectives.ddp_buckets import BucketTable
from ddpilot.record.collectives.operations import (
    MAX_SPLITS,
    Operation,
    alike_tensors,
    count_bytes,
    describe_tensors,
    flags_of,
    number_at,
    tensors_of,
    what_is_alike,
)
from ddpilot.record.collectives.unfinished_works import RecordTemplate, Ticket, UnfinishedWorks
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.log import GroupEntry, GroupTable
from ddpilot.record.flight_ring.writer import ForkGuard, RingWriter
from ddpilot.record.main_thread import InitFinder, PendingInit

Begin = Callable[[Sequence[Any]], Ticket | None]
Started = Callable[[Ticket | None, Any], None]

reducer_observers: list[Callable[[int, int, Any], None]] = []
"""Called with the start in ns, the bytes and the boxed work of each collective that DDP's reducer has started."""


def is_handling_error() -> bool:
    """True if the main thread is handling an exception: in an `except`, or leaving through a `finally`."""
    held: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return (held[1] if isinstance(held, tuple) else held) is not None  # three values before Python 3.12


class Recorder:
    """Records every collective that the kernels report into `ring`.

    `report` prints one line; `registry` is `torch.distributed.distributed_c10d`. The first error in here is reported
    and kept in the ring, later ones are counted there. Errors are not raised, but KeyboardInterrupt is, as anywhere in
    Python.
    """

    def __init__(
        self,
        ring: RingWriter,
        describer: RecordBuilder,
        pending: UnfinishedWorks,
        *,
        registry: Any,
        groups: GroupTable,
        report: Callable[[str], None],
    ) -> None:
        self._ring = ring
        self._is_in_group, self._was_in_group = registry.is_initialized, False
        self._groups, self._has_been_in_group = groups, False
        self._find_entering = InitFinder(registry.init_process_group).find
        self._entering: PendingInit | None = None
        self._describer = describer
        self._pending = pending
        self._report: Callable[[str], None] | None = report
        self._forks = ForkGuard()
        self._start_ns = 0

    def begin_of(self, operation: Operation) -> Begin:
        """Return the function to call with the arguments of `operation` when torch is about to start it."""
        begin = self._describer.begin_of(operation)
        mark, is_fork, clock_ns, frame_at = self._forks.mark, self._forks.is_fork, time.monotonic_ns, sys._getframe

        def begin_safely(args: Sequence[Any]) -> Ticket | None:
            if (
                is_fork() if mark is None else not mark[0]
            ):  # a forked process, such as a DataLoader worker, has the ring mapped too
                return None
            self._start_ns = start_ns = clock_ns()
            try:
                # The caller's own frame always exists; it may have no caller, in a thread created by C++.
                return begin(args, frame_at(1).f_back, start_ns)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self._fault(error)
                return None

        return begin_safely

    def started_of(self, operation: Operation) -> Started:
        """Return the function to call after `operation` has started, with its ticket and result."""
        at, add, finish = operation.work_at, self._pending.add, self._ring.finish

        def started(ticket: Ticket | None, result: Any) -> None:
            if ticket is None:
                return
            try:
                if at is None:
                    finish(ticket[0], time.monotonic_ns(), layout.DONE)
                    return
                boxed = result if at < 0 else result[at]
                if boxed is None:  # as for each of several coalesced calls
                    finish(ticket[0], 0, layout.UNKNOWN)
                    return
                add(ticket, boxed)
                if reducer_observers and ticket[1].is_by_reducer:
                    for observe in reducer_observers:
                        observe(self._start_ns, ticket[1].num_bytes, boxed)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self._fault(error)

        return started

    def cut_short(self, ticket: Ticket | None, error: BaseException) -> None:
        """Finish the record of `ticket`, whose collective raised `error` or was interrupted by Ctrl-C."""
        try:
            if ticket is not None:
                outcome = layout.FAILED if isinstance(error, Exception) else layout.UNKNOWN
                self._ring.finish(ticket[0], time.monotonic_ns(), outcome)
            elif not self._forks.is_fork():  # the record may exist without its ticket
                self._ring.finish_started_at(self._start_ns, self._describer.thread_id(), layout.UNKNOWN)
        except Exception as fault:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(fault)

    def tick(self) -> None:
        """Called periodically by the recording's own thread: write the heartbeat, and update works and groups."""
        try:
            now_ns = time.monotonic_ns()
            self._ring.beat(now_ns)
            self._pending.catch_up()
            self._note_group(now_ns)
            entering = None if self._was_in_group else self._find_entering(now_ns)
            if entering != self._entering:
                self._entering = entering
                self._ring.enter(*(entering or (0,)))
        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(error)

    def _note_group(self, now_ns: int) -> None:
        if not self._has_been_in_group and self._groups.has_used_any:
            # The group may have been created and destroyed between two ticks.
            self._has_been_in_group = self._was_in_group = True
        if self._is_in_group() != self._was_in_group and (not self._was_in_group or not is_handling_error()):
            self._has_been_in_group = True
            self._was_in_group = not self._was_in_group
            self._ring.leave(0 if self._was_in_group else now_ns)

    def leave(self) -> None:
        """Record that the program has ended without an error: it starts no more collectives."""
        try:
            self._ring.leave(time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
            self._fault(error)

    def close(self) -> None:
        """Update a last time, release every work and close the ring."""
        self.tick()
        self._report = None  # a thread that is in a collective now will find the ring closed
        self._pending.clear()
        self._ring.close(time.monotonic_ns())

    def _fault(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        report, self._report = self._report, None
        # If this fails too, there is no way left to report it.
        with suppress(Exception):
            self._ring.note_fault(text)
        with suppress(Exception):
            if report is not None:
                report(f"a collective could not be recorded ({text}); training continues, this is reported once")


MAX_REFS = 20_000
"""Maximum number of cached keys; each takes some hundred bytes."""


class RecordBuilder:
    """Writes records into `ring`. `unbox` converts the source's boxed group to a `ProcessGroup`.

    Most collectives repeat an earlier one, from the same line and with tensors of the same shapes: only number, time
    and thread are new. Everything else is built once and cached by a key.
    """

    def __init__(
        self,
        ring: RingWriter,
        *,
        groups: GroupTable,
        buckets: BucketTable,
        sites: SiteFinder,
        unbox: Callable[[Any], Any],
    ) -> None:
        self._ring = ring
        self._groups = groups
        self._buckets = buckets
        self._sites = sites
        self._unbox = unbox
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
        # Each function that is called here costs microseconds: in a training step, its code is not in the caches.
        by_id = self._groups.by_id
        unbox, find, walk, thread_id = self._unbox, self._groups.find, self._sites.walk, self.thread_id
        callers_of, ident, main_ident = self._sites.callers, threading.get_ident, self._main_ident
        write, refs, next_seqs = self._ring.begin, self._ring.refs, self._groups.next_seqs

        def begin(args: Sequence[Any], frame: FrameType | None, start_ns: int) -> Ticket:
            process_group = unbox(args[group_at])
            group = by_id.get(id(process_group))
            if group is None or group.alive() is not process_group:
                group = find(process_group)
            try:
                trail = user, called, ddp, in_reducer = walk(frame)
                if user is None and in_reducer:
                    # The autograd engine runs the backward of an accelerator in its own threads, while the main thread
                    # waits.
                    trail = user, called, _, _ = walk(main_frame())
                code, at = (user.f_code, user.f_lasti) if user is not None else (None, 0)
                callers, led_by = callers_of(user)
                if list_at >= 0 and len(args[list_at]) == 1:  # by far the most frequent case
                    only = args[list_at][0]
                    key = (
                        *(operator, group.number, id(code), at, id(called), led_by),
                        *(only.shape, only.dtype, only.device),
                        *args[plain_from:],
                        in_reducer,
                    )
                else:
                    alike = what_is_alike(operation, args)
                    key = (operator, group.number, id(code), at, id(called), led_by, *alike, in_reducer)
                usual = refs.get(key) or self._make_usual(key, operation, args, group, trail, callers)
                role = self._role(operation, args, ddp, in_reducer, frame) if ddp or in_reducer else 0
                reduce_op = args[reduce_op_at] if reduce_op_at >= 0 else None
                seq = -1 if is_p2p else next_seqs[group.number]
                thread = (self._main_id if ident() == main_ident else 0) or thread_id()
                index = write(start_ns, seq, thread, role, usual.packed)
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
        trail: CallPath,
        callers: Sequence[FrameType],
    ) -> RecordTemplate:
        site = key[2:6]
        if len(self._ring.refs) > MAX_REFS:
            self._ring.forget()
        # Keys contain the `id` of these objects, which must not be reused for others.
        self._ring.refs["kept", site] = (trail[0] and trail[0].f_code, trail[1], *(each.f_code for each in callers))
        inputs, outputs = tensors_of(operation, args)
        splits = [tuple(args[at][:MAX_SPLITS]) for at in operation.splits_at]
        placed = [args[operation.device_at]] if operation.device_at >= 0 else inputs or outputs
        device = placed[0].device.type if placed else ""
        at_any_time = group.may_be_polled(device)
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
        reports_failure = not operation.is_p2p and group.reports_failure(device)
        usual = RecordTemplate(
            packed=packed,
            num_bytes=num_bytes,
            is_by_reducer=key[-1],
            group=-1 if operation.is_p2p else group.number,
            at_any_time=at_any_time,
            may_be_captured=not at_any_time and device != "cpu",
            reports_failure=reports_failure,
            may_be_waited_for=device == "cpu" and (at_any_time or flags == layout.NOT_ASYNC),
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
    ) -> int:
        if in_reducer:
            at = operation.list_at
            is_single = at >= 0 and len(args[at]) == 1
            tensors = args[at] if is_single else tensors_of(operation, args)[0]
            num_elements = tensors[0].numel() if is_single else sum(tensor.numel() for tensor in tensors)
            bucket = self._buckets.match(num_elements)
            if bucket is not None:
                ref: int | None = self._ring.refs.get(bucket)
                return self._refer(bucket, lambda: bucket.fact) if ref is None else ref
        what = "gradients" if in_reducer else _what_ddp_does(ddp, operation.name)
        name = ""
        if what in ("construction", "bucket order") and (model := find_ddp_model(frame)) is not None:
            name = type(model.module).__name__
            known = self._buckets.add(model)
            if what == "bucket order":
                known.add_broadcast(args[operation.list_at][0])
        return self._refer((what, name), lambda: {"what": what, "model": name}) if what else 0


def _what_ddp_does(function: str, op: str) -> str:
    if function == "__init__":
        return "construction"
    if function == "_pre_forward":
        # After the first backward torch rebuilds the buckets, in C++. Join counts the ranks that have data.
        return "bucket order" if op == "broadcast" else "join"
    if "match" in function or "final" in function or "global_requires" in function:
        return "join"  # run by ranks without more data to match the others' collectives
    return "buffers" if "sync" in function or "broadcast" in function else ""
