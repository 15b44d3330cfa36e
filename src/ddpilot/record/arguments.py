# SPDX-License-Identifier: Apache-2.0
"""Read tensors, numbers and flags from a collective's arguments, and make keys by which identical calls are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddpilot.record.collectives.operations import Operation
from ddpilot.record.flight_ring import layout

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
            fact[name] = [_describe_tensor(tensor) for tensor in tensors[:MAX_TENSORS]]
            fact[f"num_{name}"] = len(tensors)
    if any(splits):
        fact["splits"] = [list(sizes) for sizes in splits]
    return fact


def _describe_tensor(tensor: Any) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.device)]
