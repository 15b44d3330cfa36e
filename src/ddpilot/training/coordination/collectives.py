# SPDX-License-Identifier: Apache-2.0
"""Reduces values and gathers rows over all ranks, also with gradients; runs rank 0 first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddpilot.data.nested import join_named_rows, to_host
from ddpilot.errors import LoopError, RemoteRankError
from ddpilot.group.device import wire_device
from ddpilot.group.protocol import GroupLike, ReduceOp


def weighted_mean(value: torch.Tensor, count: float, group: GroupLike) -> torch.Tensor:
    """Return the mean of `value` (any shape, the same on all ranks), weighted by `count`. Collective.

    Computed in float64 (float32 on MPS); returned in the dtype of `value` if that is floating point. A rank with a
    count of 0 takes part, even if its value is NaN; the result is NaN if the counts of all ranks are 0.
    """
    wide = torch.float32 if value.device.type == "mps" else torch.float64
    total = value.detach().to(wide) * count if count else torch.zeros_like(value, dtype=wide)
    # new_tensor() would copy from the host, which waits for the device.
    both = torch.cat([total.reshape(-1), total.new_full((1,), float(count))])
    if group.world_size > 1:
        group.all_reduce(both)
    mean = (both[:-1] / both[-1]).reshape(value.shape)
    return mean.to(value.dtype) if value.is_floating_point() else mean


def reduce_value(value: Any, op: str, count: float, group: GroupLike) -> torch.Tensor:
    """Reduce `value`, a number or a tensor, over all ranks; only "mean" is weighted by `count`. Collective.

    `op`: "mean", "sum", "min" or "max". Raises LoopError for an unknown `op` and for other types of `value`.
    """
    is_tensor = isinstance(value, torch.Tensor)
    try:
        tensor = value.detach() if is_tensor else _make_tensor(value, group.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoopError(
            "reducing a value over ranks",
            found=f"{value!r}, which cannot be converted to a tensor",
            fix="Pass a number or a tensor, of the same shape on all ranks; loop.gather() takes lists of objects.",
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
        )
    return group.all_reduce(tensor.clone(), ops[op]) if group.world_size > 1 else tensor.clone()


def _make_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """Return `value` in float64; a number is written on `device`, for which the host does not wait."""
    if isinstance(value, (int, float)) and device.type != "mps":
        return torch.full((), float(value), dtype=torch.float64, device=device)
    return torch.tensor(value, dtype=torch.float64)


def gather_rows(data: Any, group: GroupLike) -> Any:
    """Return the rows of all ranks, in rank order, on every rank, on the CPU. Collective.

    `data`: tensors with any number of rows, and tuples, dicts and lists as for `join_rows`. Raises LoopError on all
    ranks if anything except the number of rows differs.
    """
    mine = to_host(data)
    names = [f"rank {rank}" for rank in range(group.world_size)]
    parts = [mine] if group.world_size == 1 else group.all_gather_object(mine)
    return join_named_rows(parts, names, "gathering rows of all ranks")


def gather_batch(rows: Any, group: GroupLike) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks and the index of this rank's first row; see `Loop.gather_batch`.

    Collective, and so is its backward pass.
    """
    if not isinstance(rows, torch.Tensor) or not rows.ndim:
        is_tensor = isinstance(rows, torch.Tensor)
        found = f"a tensor of shape {tuple(rows.shape)}" if is_tensor else f"a {type(rows).__name__}"
        raise _rows_error(found, "Pass a tensor whose first dimension is rows; of one value: reshape(1).")
    if group.world_size == 1:
        return rows, 0
    sizes, needs_gradient = _agree_on_sizes(rows, group)
    if needs_gradient and not rows.requires_grad:  # otherwise the other ranks would wait for this one in backward
        rows = rows.detach().requires_grad_()
    start = sum(sizes[: group.rank])
    joined: torch.Tensor = _GatherRows.apply(rows, start, sum(sizes), group)  # type: ignore[no-untyped-call]
    return joined, start


def _agree_on_sizes(rows: torch.Tensor, group: GroupLike) -> tuple[list[int], bool]:
    """Return the number of rows of each rank, and True if any rank needs a gradient. Collective.

    Raises LoopError on all ranks if the shapes of a row or the dtypes differ.
    """
    kind = f"(*, {', '.join(map(str, rows.shape[1:]))}) {rows.dtype}"
    number = int.from_bytes(hashlib.sha256(kind.encode()).digest()[:2], "little")
    needs_gradient = rows.requires_grad and torch.is_grad_enabled()
    own = [len(rows) if rank == group.rank else 0 for rank in range(group.world_size)]
    mine = torch.tensor([*own, number, number**2, int(needs_gradient)], device=wire_device(group))
    sums = group.all_reduce(mine).tolist()
    *sizes, first, second, num_needing = sums
    if first**2 != group.world_size * second:
        fix = "Only the number of rows may differ; a rank without rows passes (0, ...) of the same shape and dtype."
        raise _rows_error(f"rows that do not fit those of other ranks: {kind} here", fix)
    return sizes, num_needing > 0


class _GatherRows(torch.autograd.Function):
    """Gathers the rows of all ranks; backward sums the gradients of all ranks' losses for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, start: int, num: int, group: GroupLike) -> torch.Tensor:
        ctx.place = start, len(rows), group
        joined = rows.new_zeros((num, *rows.shape[1:]))
        joined[start : start + len(rows)] = rows
        if joined.numel():  # as bytes, whose sums with zeros are exact in every dtype
            group.all_reduce(joined.reshape(-1).view(torch.uint8))
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        start, num, group = ctx.place
        (gradient,) = gradients
        narrow = gradient.dtype if gradient.dtype.itemsize < 4 else None
        total = gradient.float() if narrow else gradient.clone(memory_format=torch.contiguous_format)
        if total.numel():
            group.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
        own = total[start : start + num]
        return (own.to(narrow) if narrow else own), None, None, None


def _rows_error(found: str, fix: str) -> LoopError:
    return LoopError("gathering the rows of a batch", found=found, fix=fix)


@contextmanager
def rank_zero_first(group: GroupLike) -> Iterator[None]:
    """Run the block on rank 0, then on the other ranks in parallel; see `Loop.rank_zero_first`. Collective."""
    if group.world_size == 1:
        yield
        return
    if not group.is_rank_zero:
        failure = group.broadcast_object(None)
        if failure:
            raise RemoteRankError(
                "waiting for rank 0 to go first",
                found=f"rank 0 raised {failure}",
                fix="See rank 0's traceback; this rank stops because of it.",
                rank=group.rank,
            )
        yield
        return
    failure = "an exit"
    try:
        yield
        failure = ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        group.broadcast_object(failure)
