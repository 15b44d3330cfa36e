# SPDX-License-Identifier: Apache-2.0
"""Put a collective that is about to start into a record and the facts that it refers to.

Most collectives are like one before, from the same line with tensors of the same shape; for those only the number, the
time and the thread are new. Everything else is made once and found again by a key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ddpilot.record import layout
from ddpilot.record.buckets import BucketBook
from ddpilot.record.groups import GroupBook, GroupEntry
from ddpilot.record.operations import Operation, flatten
from ddpilot.record.ring import RingWriter
from ddpilot.record.sites import SiteFinder, Trail, describe_site, find_ddp_model, main_frame

MAX_TENSORS = 32
MAX_SPLITS = 512


class Usual(NamedTuple):
    """What collectives that are alike have in common."""

    packed: bytes
    """Part of the record, as `layout.USUAL`."""
    num_bytes: int
    at_any_time: bool
    """Any thread may ask at any time whether it is over."""
    codes: tuple[CodeType | None, ...]
    """Kept, since the key holds their `id`."""


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

    def begin(self, operation: Operation, args: Sequence[Any], frame: FrameType | None) -> tuple[int, Usual, Any]:
        """Write the record of `operation`, called with `args` on the stack of `frame`.

        Returns its index, what it has in common with others, and its reduce-op as torch boxes it, or None.
        """
        group = self._groups.find(self._unbox(args[operation.group_at]))
        trail = self._sites.walk(frame)
        user, called, ddp, in_reducer = trail
        if user is None and in_reducer:
            # The engine runs the backward of an accelerator in threads of its own; who waits for it is the main thread.
            trail = self._sites.walk(main_frame())
            user, called, _, _ = trail
        code, at = (user.f_code, user.f_lasti) if user is not None else (None, 0)
        tensors: Sequence[Any] = args[operation.list_at] if operation.list_at >= 0 else ()
        if len(tensors) == 1:
            only = tensors[0]
            alike: tuple[Any, ...] = (only.shape, only.dtype, only.device, *args[operation.plain_from :])
        else:
            alike = _what_is_alike(operation, args)
        key = (operation.operator, id(code), at, id(called), group.number, alike)
        usual = self._ring.refs.get(key) or self._make_usual(key, operation, args, group, trail)
        index = self._ring.begin(
            time.monotonic_ns(),
            -1 if operation.is_p2p else group.next_seq(),
            self._thread_id(),
            self._role(operation, args, ddp, in_reducer, frame) if ddp or in_reducer else 0,
            usual.packed,
        )
        return index, usual, args[operation.reduce_op_at] if operation.reduce_op_at >= 0 else None

    def _thread_id(self) -> int:
        # Asking the system costs 1 us. `Thread.native_id` would not: after a fork it is still the parent's.
        if threading.get_ident() != self._main_ident:
            return threading.get_native_id()
        self._main_id = self._main_id or threading.get_native_id()
        return self._main_id

    def _make_usual(
        self, key: Any, operation: Operation, args: Sequence[Any], group: GroupEntry, trail: Trail
    ) -> Usual:
        inputs, outputs = _tensors_of(operation, args)
        placed = [*inputs, *outputs, *([args[operation.device_at]] if operation.device_at >= 0 else [])]
        fact = _describe_tensors(inputs, outputs, [args[at] for at in operation.splits_at])
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs or outputs)
        packed = layout.USUAL.pack(
            self._refer(operation.operator, operation.describe()),
            self._refer(group.number, group.fact),
            self._ring.write_fact(describe_site(trail)),
            self._ring.write_fact(fact) if fact else 0,
            _number(args, operation.root_at),
            _number(args, operation.peer_at),
            _number(args, operation.tag_at),
            _flags(operation, args),
            num_bytes,
        )
        codes = (trail[0].f_code if trail[0] is not None else None, trail[1])
        usual = Usual(packed, num_bytes, group.may_be_asked(placed[0].device.type if placed else ""), codes)
        self._ring.refs[key] = usual
        return usual

    def _refer(self, key: Any, fact: dict[str, Any]) -> int:
        ref: int = self._ring.refs.get(key) or self._ring.write_fact(fact)
        self._ring.refs[key] = ref
        return ref

    def _role(
        self, operation: Operation, args: Sequence[Any], ddp: str, in_reducer: bool, frame: FrameType | None
    ) -> int:
        if in_reducer:
            bucket = self._buckets.match(sum(tensor.numel() for tensor in _tensors_of(operation, args)[0]))
            if bucket is not None:
                return self._refer(bucket, bucket.fact)
        what = "gradients" if in_reducer else _what_ddp_does(ddp)
        name = ""
        if what in ("construction", "bucket order") and (model := find_ddp_model(frame)) is not None:
            name = type(model.module).__name__
            known = self._buckets.add(model)
            if what == "bucket order":
                known.hear(args[operation.list_at][0])
        return self._refer((what, name), {"what": what, "model": name}) if what else 0


def _what_ddp_does(function: str) -> str:
    if function == "__init__":
        return "construction"
    if function == "_pre_forward":
        return "bucket order"  # after the first backward torch rebuilds the buckets, from C++
    if "match" in function or "final" in function or "global_requires" in function:
        return "join"  # what ranks that have no more data run in place of the others' collectives
    return "buffers" if "sync" in function or "broadcast" in function else ""


def _tensors_of(operation: Operation, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return flatten([args[at] for at in operation.inputs_at]), flatten([args[at] for at in operation.outputs_at])


def _what_is_alike(operation: Operation, args: Sequence[Any]) -> tuple[Any, ...]:
    inputs, outputs = _tensors_of(operation, args)
    shown = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (*inputs[:MAX_TENSORS], *outputs[:MAX_TENSORS])]
    # What is not shown tells calls apart by its size alone.
    hidden = sum(tensor.nbytes for tensor in inputs) if len(inputs) > MAX_TENSORS else len(outputs)
    numbers = [_number(args, at) for at in (operation.root_at, operation.peer_at, operation.tag_at)]
    splits = [tuple(args[at]) for at in operation.splits_at]
    return (len(inputs), hidden, *shown, *numbers, *splits, _flags(operation, args))


def _number(args: Sequence[Any], at: int) -> Any:
    return args[at] if 0 <= at < len(args) and args[at] is not None else layout.NO_NUMBER


def _flags(operation: Operation, args: Sequence[Any]) -> int:
    if operation.is_p2p:
        return layout.P2P
    if operation.async_at < 0:
        return 0
    is_async = args[operation.async_at] if operation.async_at < len(args) else True  # torch's default
    return layout.ASYNC if is_async else layout.NOT_ASYNC


def _describe_tensors(inputs: Sequence[Any], outputs: Sequence[Any], splits: Sequence[Sequence[int]]) -> dict[str, Any]:
    fact: dict[str, Any] = {}
    for name, tensors in (("inputs", inputs), ("outputs", outputs)):
        if tensors:
            fact[name] = [_describe_tensor(tensor) for tensor in tensors[:MAX_TENSORS]]
            fact[f"num_{name}"] = len(tensors)
    if any(splits):
        fact["splits"] = [list(sizes[:MAX_SPLITS]) for sizes in splits]
    return fact


def _describe_tensor(tensor: Any) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.device)]
