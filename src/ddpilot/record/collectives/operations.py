# SPDX-License-Identifier: Apache-2.0
"""Torch's `c10d::` operators: which argument is the group, which the tensors, and a call's sizes and flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpilot.record.flight_ring import layout

# PyTorch's public names that are not the operator's name without underscores.
_SPELLINGS = {
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "recv_any_source_": "recv",
}
_BARRIERS = ("barrier", "monitored_barrier_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator. Fields that end in `_at` are indices of arguments, -1 if the operator has none."""

    name: str
    """PyTorch's public name, such as ``all_reduce``."""
    operator: str
    """torch's name, such as ``c10d::allreduce_``."""
    group_at: int
    inputs_at: tuple[int, ...] = ()
    """Tensors, lists of tensors and lists of lists that this rank sends, including those changed in place."""
    outputs_at: tuple[int, ...] = ()
    """Tensors that are only written."""
    reduce_op_at: int = -1
    root_at: int = -1
    peer_at: int = -1
    tag_at: int = -1
    async_at: int = -1
    device_at: int = -1
    """A tensor on the device of the collective, if there are neither inputs nor outputs."""
    splits_at: tuple[int, ...] = ()
    work_at: int | None = None
    """Index of the `Work` in the results, -1 if it is the only result; None if the operator returns after
    completion."""
    is_p2p: bool = False

    list_at: int = -1
    """The list of tensors, if it is the only argument with tensors."""
    plain_from: int = 0
    """Index from which, if `list_at` is set, arguments are scalars."""

    def describe(self) -> dict[str, Any]:
        """Return the fact that the ring holds."""
        return {"op": self.name, "operator": self.operator}


def plan_operation(operator: str, schema: Any) -> Operation | str:
    """Plan `operator` (such as ``c10d::allreduce_``) from its `schema`, or return the reason why it is not recorded.

    Arguments of unknown name or type are ignored, so that operators of a later torch are recorded without them.
    """
    types = [str(argument.type) for argument in schema.arguments]
    names = [argument.name for argument in schema.arguments]
    group_at = _first(types, "ProcessGroup")
    if group_at < 0:
        return "no process group among its arguments: it is local to the rank"
    if any(argument.kwarg_only for argument in schema.arguments):
        return "it has arguments that are given by name only, which no operator had so far"
    base = operator.partition("::")[2].partition(".")[0]
    tensors = [at for at, kind in enumerate(types) if kind.replace("List[", "").rstrip("]") == "Tensor"]
    outputs = [at for at in tensors if names[at].startswith("output")]
    is_p2p = "tag" in names
    plain_from = max(group_at, _first(types, "ReduceOp"), *tensors, 0) + 1
    is_plain = len(tensors) == 1 and not any(kind.startswith("List") for kind in types[plain_from:])
    list_at = tensors[0] if is_plain and types[tensors[0]] == "List[Tensor]" else -1
    results = [str(result.type) for result in schema.returns]
    work_at = _first(results, "Work")
    device_at = -1
    if base in _BARRIERS:
        device_at = _first(types, "Tensor")
        tensors, outputs = [], []
    elif is_p2p and base.startswith("recv"):
        outputs = tensors
    return Operation(
        name=_SPELLINGS.get(base, base.strip("_")),
        operator=operator,
        group_at=group_at,
        inputs_at=tuple(at for at in tensors if at not in outputs),
        outputs_at=tuple(outputs),
        reduce_op_at=_first(types, "ReduceOp"),
        root_at=_first(names, "root_rank"),
        peer_at=max(_first(names, "dst"), _first(names, "src")),
        tag_at=_first(names, "tag"),
        async_at=_first(names, "async_op"),
        device_at=device_at,
        list_at=list_at,
        plain_from=plain_from,
        splits_at=tuple(at for at, name in enumerate(names) if name.endswith("split_sizes")),
        work_at=None if work_at < 0 else -1 if len(results) == 1 else work_at,
        is_p2p=is_p2p,
    )


def _first(values: Sequence[str], ending: str) -> int:
    return next((at for at, value in enumerate(values) if value.endswith(ending)), -1)


MAX_TENSORS = 32
MAX_SPLITS = 512


def what_is_alike(operation: Operation, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key, equal for calls of `operation` whose records differ only in number, time, thread and role."""
    inputs, outputs = tensors_of(operation, args)
    numbers = [number_at(args, at) for at in (operation.root_at, operation.peer_at, operation.tag_at)]
    splits = [tuple(args[at]) for at in operation.splits_at]
    return (*alike_tensors(inputs), *alike_tensors(outputs), *numbers, *splits, flags_of(operation, args))


def alike_tensors(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that have the same description in the ring."""
    shown = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[:MAX_TENSORS]]
    return (len(tensors), count_bytes(tensors[MAX_TENSORS:]), *shown)


def tensors_of(operation: Operation, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors that the rank sends, and those that are only written."""
    return _flatten([args[at] for at in operation.inputs_at]), _flatten([args[at] for at in operation.outputs_at])


def _flatten(values: Iterable[Any]) -> list[Any]:
    # Values are tensors, lists of tensors or lists of lists of tensors.
    flat: list[Any] = []
    for value in values:
        flat += _flatten(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def count_bytes(tensors: Iterable[Any]) -> int:
    """Return the size of all elements of `tensors`; `nbytes` does not support sparse tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def number_at(args: Sequence[Any], at: int) -> Any:
    """Return the number at index `at` of `args`, as records hold it."""
    return args[at] if 0 <= at < len(args) and args[at] is not None else layout.NO_NUMBER


def flags_of(operation: Operation, args: Sequence[Any]) -> int:
    """Return the flags of a call: point-to-point, asynchronous or not asynchronous."""
    if operation.is_p2p:
        return layout.P2P
    if operation.async_at < 0:
        return 0
    is_async = args[operation.async_at] if operation.async_at < len(args) else True  # torch's default
    return layout.ASYNC if is_async else layout.NOT_ASYNC


def describe_tensors(inputs: Sequence[Any], outputs: Sequence[Any], splits: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the ring's fact for the tensors of a collective; empty if it has none."""
    fact: dict[str, Any] = {}
    for name, tensors in (("inputs", inputs), ("outputs", outputs)):
        if tensors:
            shown = tensors[:MAX_TENSORS]
            fact[name] = [
                [str(each.dtype).removeprefix("torch."), list(each.shape), str(each.device)] for each in shown
            ]
            fact[f"num_{name}"] = len(tensors)
    if any(splits):
        fact["splits"] = [list(sizes) for sizes in splits]
    return fact
