# SPDX-License-Identifier: Apache-2.0
"""One number of all ranks, and the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike, ReduceOp
from ddpilot.training.structure import join_named_rows, to_host


def weighted_mean(value: torch.Tensor, count: float, group: GroupLike) -> torch.Tensor:
    """Mean of the ranks' `value`s (any shape, the same on all), each as often as its `count`. Collective.

    In float64 on the way, and in the dtype of `value` at the end. A rank with a count of 0 takes part, whatever its
    value is, NaN too; NaN where the counts of all ranks are 0.
    """
    wide = torch.float32 if value.device.type == "mps" else torch.float64
    total = value.detach().to(wide) * count if count else torch.zeros_like(value, dtype=wide)
    both = torch.cat([total.reshape(-1), total.new_tensor([count])])
    if group.world_size > 1:
        group.all_reduce(both)
    mean = (both[:-1] / both[-1]).reshape(value.shape)
    return mean.to(value.dtype) if value.is_floating_point() else mean


def reduce_value(value: Any, op: str, count: float, group: GroupLike) -> torch.Tensor:
    """`value`, a number or a tensor, over all ranks: "mean" is weighted by `count`; "sum", "min", "max" are not."""
    is_tensor = isinstance(value, torch.Tensor)
    try:
        tensor = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoopError(
            "reducing a value over ranks",
            found=f"{value!r}, of which no tensor can be made",
            fix="Pass a number or a tensor, of the same shape on all ranks; loop.gather() takes lists of objects.",
            rank=group.rank,
        ) from error
    tensor = tensor.to(group.device) if is_tensor or group.device.type != "mps" else tensor.float().to(group.device)
    if op == "mean":
        return weighted_mean(tensor, count, group)
    ops: dict[str, ReduceOp] = {"sum": "sum", "min": "min", "max": "max"}
    if op not in ops:
        raise LoopError(
            "reducing a value over ranks",
            found=f"`op` is {op!r}",
            fix="Use 'mean' (weighted by samples), 'sum', 'min' or 'max'.",
            rank=group.rank,
        )
    return group.all_reduce(tensor.clone(), ops[op]) if group.world_size > 1 else tensor.clone()


def gather_rows(data: Any, group: GroupLike) -> Any:
    """The rows of all ranks, in the order of ranks, on every rank and on the CPU. Collective.

    `data`: tensors of any number of rows, and tuples, dicts and lists as `join_rows` takes them. LoopError on all
    ranks where they differ in more than that.
    """
    mine = to_host(data)
    if group.world_size == 1:
        return mine
    names = [f"rank {rank}" for rank in range(group.world_size)]
    return join_named_rows(group.all_gather_object(mine), names, "gathering rows of all ranks", group.rank)
