# SPDX-License-Identifier: Apache-2.0
"""What each of torch's `c10d::` operators is: which argument says what, read from the operator's schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# PyTorch's public spelling, where it is not the operator's without underscores.
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
    """One operator. What ends in `_at` is the number of an argument, -1 where there is none."""

    name: str
    """In PyTorch's public spelling, such as ``all_reduce``."""
    operator: str
    """torch's own name for it, such as ``c10d::allreduce_``."""
    group_at: int
    inputs_at: tuple[int, ...] = ()
    """The tensors, lists of tensors and lists of lists that this rank gives; those that it changes in place too."""
    outputs_at: tuple[int, ...] = ()
    """Those that it only fills."""
    reduce_op_at: int = -1
    root_at: int = -1
    peer_at: int = -1
    tag_at: int = -1
    async_at: int = -1
    device_at: int = -1
    """A tensor that is on the device of the collective, where neither inputs nor outputs are."""
    splits_at: tuple[int, ...] = ()
    work_at: int | None = None
    """Where the `Work` is among the results, -1 where it is the only one; None: done when the operator returns."""
    is_p2p: bool = False

    list_at: int = -1
    """The list of tensors, where that is all the tensors there are."""
    plain_from: int = 0
    """From here on, if `list_at` is there, arguments are numbers and the like."""

    def describe(self) -> dict[str, Any]:
        """The fact that the ring holds."""
        return {"op": self.name, "operator": self.operator}


def plan_operation(operator: str, schema: Any) -> Operation | str:
    """What `operator` (such as ``c10d::allreduce_``) is by its `schema`; or, in words, why it is not recorded.

    An argument of an unknown name or type is left out, so that an operator of a later torch is recorded without it.
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
        name=spell(base),
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


def spell(base: str) -> str:
    """PyTorch's public name of the operator, or of the hook's operation, that is called `base`."""
    variants = (base, f"{base}_", f"_{base}_")
    return next((_SPELLINGS[variant] for variant in variants if variant in _SPELLINGS), base.strip("_"))


def _first(values: Sequence[str], ending: str) -> int:
    return next((at for at, value in enumerate(values) if value.endswith(ending)), -1)


def _holds_tensors(kind: str) -> bool:
    return kind.replace("List[", "").rstrip("]") == "Tensor"


def _find_work(results: Sequence[str]) -> int | None:
    at = _first(results, "Work")
    return None if at < 0 else -1 if len(results) == 1 else at
