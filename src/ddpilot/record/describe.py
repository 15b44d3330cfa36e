# SPDX-License-Identifier: Apache-2.0
"""Put a collective that is about to start into a record and the facts that it refers to.

Most collectives are like one before, from the same line with tensors of the same shape; for those only the number, the
time and the thread are new. Everything else is made once and found again by a key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ddpilot.record import layout
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
from ddpilot.record.buckets import BucketBook
from ddpilot.record.groups import GroupBook, GroupEntry
from ddpilot.record.operations import Operation
from ddpilot.record.pending import Usual
from ddpilot.record.ring import RingWriter
from ddpilot.record.sites import SiteFinder, Trail, describe_site, find_ddp_model, main_frame

MAX_REFS = 20_000
"""How many keys are remembered: each takes some hundred bytes of the rank's memory."""


class Describer:
    """Writes records into `ring`. `unbox` makes a `ProcessGroup` of what the source has in its place."""

    def __init__(
        self,
        ring: RingWriter,
        *,
        groups: GroupBook,
        buckets: BucketBook,
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
        """The operating system's id of this thread."""
        # Asking the system costs 1 us. `Thread.native_id` would not: after a fork it is still the parent's.
        if threading.get_ident() != self._main_ident:
            return threading.get_native_id()
        self._main_id = self._main_id or threading.get_native_id()
        return self._main_id

    def begin(
        self, operation: Operation, args: Sequence[Any], frame: FrameType | None, start_ns: int
    ) -> tuple[int, Usual]:
        """Write the record of `operation`, called with `args` on the stack of `frame`.

        Returns its index, and what it has in common with others.
        """
        group = self._groups.find(self._unbox(args[operation.group_at]))
        try:
            return self._begin(operation, args, group, frame, start_ns)
        except Exception:
            group.next_seq += not operation.is_p2p  # the other ranks count it
            raise

    def _begin(
        self, operation: Operation, args: Sequence[Any], group: GroupEntry, frame: FrameType | None, start_ns: int
    ) -> tuple[int, Usual]:
        trail = user, called, ddp, in_reducer = self._sites.walk(frame)
        if user is None and in_reducer:
            # The engine runs the backward of an accelerator in threads of its own; who waits for it is the main thread.
            trail = user, called, _, _ = self._sites.walk(main_frame())
        site = (id(user.f_code), user.f_lasti, id(called)) if user is not None else (0, 0, id(called))
        key = (operation.operator, group.number, site, what_is_alike(operation, args))
        usual = self._ring.refs.get(key) or self._make_usual(key, operation, args, group, trail)
        role = self._role(operation, args, ddp, in_reducer, frame) if ddp or in_reducer else 0
        is_main = threading.get_ident() == self._main_ident
        thread = self._main_id if is_main and self._main_id else self.thread_id()
        if operation.is_p2p:
            return self._ring.begin(start_ns, -1, thread, role, usual.packed), usual
        seq = group.next_seq
        index = self._ring.begin(start_ns, seq, thread, role, usual.packed)
        group.next_seq = seq + 1  # last, so that one which Ctrl-C keeps from starting does not count
        return index, usual

    def _make_usual(
        self, key: tuple[Any, ...], operation: Operation, args: Sequence[Any], group: GroupEntry, trail: Trail
    ) -> Usual:
        site = key[2]
        if len(self._ring.refs) > MAX_REFS:
            self._ring.refs.clear()
        # Keys hold the `id` of these, which must not become another's.
        self._ring.refs["kept", site] = (trail[0] and trail[0].f_code, trail[1])
        inputs, outputs = tensors_of(operation, args)
        splits = [tuple(args[at][:MAX_SPLITS]) for at in operation.splits_at]
        placed = [args[operation.device_at]] if operation.device_at >= 0 else inputs or outputs
        device = placed[0].device.type if placed else ""
        at_any_time = group.may_be_asked(device)
        num_bytes = count_bytes(inputs or outputs)
        packed = layout.USUAL.pack(
            self._refer(operation.operator, operation.describe),
            self._refer(("group", group.number), lambda: group.fact),
            self._refer(("site", *site), lambda: describe_site(trail)),
            self._refer(
                ("tensors", alike_tensors(inputs), alike_tensors(outputs), *splits),
                lambda: describe_tensors(inputs, outputs, splits),
            ),
            number_at(args, operation.root_at),
            number_at(args, operation.peer_at),
            number_at(args, operation.tag_at),
            flags_of(operation, args) | at_any_time * layout.ASKED_ANY_TIME,
            num_bytes,
        )
        tells_failure = not operation.is_p2p and group.tells_failure(device)
        usual = Usual(packed, num_bytes, at_any_time, tells_failure)
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
            bucket = self._buckets.match(sum(tensor.numel() for tensor in tensors_of(operation, args)[0]))
            if bucket is not None:
                return self._refer(bucket, lambda: bucket.fact)
        what = "gradients" if in_reducer else _what_ddp_does(ddp, operation.name)
        name = ""
        if what in ("construction", "bucket order") and (model := find_ddp_model(frame)) is not None:
            name = type(model.module).__name__
            known = self._buckets.add(model)
            if what == "bucket order":
                known.hear(args[operation.list_at][0])
        return self._refer((what, name), lambda: {"what": what, "model": name}) if what else 0


def _what_ddp_does(function: str, op: str) -> str:
    if function == "__init__":
        return "construction"
    if function == "_pre_forward":
        # After the first backward torch rebuilds the buckets, from C++; Join counts those that have data.
        return "bucket order" if op == "broadcast" else "join"
    if "match" in function or "final" in function or "global_requires" in function:
        return "join"  # what ranks that have no more data run in place of the others' collectives
    return "buffers" if "sync" in function or "broadcast" in function else ""
