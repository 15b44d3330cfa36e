# SPDX-License-Identifier: Apache-2.0
"""Derive from the schemas of torch's `c10d::` operators which argument is the group, which the tensors, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    tensors = [at for at, kind in enumerate(types) if _holds_tensors(kind)]
    outputs = [at for at in tensors if names[at].startswith("output")]
    is_p2p = "tag" in names
    plain_from = max(group_at, _first(types, "ReduceOp"), *tensors, 0) + 1
    is_plain = len(tensors) == 1 and not any(kind.startswith("List") for kind in types[plain_from:])
    list_at = tensors[0] if is_plain and types[tensors[0]] == "List[Tensor]" else -1
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
        work_at=_find_work([str(result.type) for result in schema.returns]),
        is_p2p=is_p2p,
    )


def _first(values: Sequence[str], ending: str) -> int:
    return next((at for at, value in enumerate(values) if value.endswith(ending)), -1)


def _holds_tensors(kind: str) -> bool:
    return kind.replace("List[", "").rstrip("]") == "Tensor"


def _find_work(results: Sequence[str]) -> int | None:
    at = _first(results, "Work")
    return None if at < 0 else -1 if len(results) == 1 else at
