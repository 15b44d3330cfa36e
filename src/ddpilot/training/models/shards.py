# SPDX-License-Identifier: Apache-2.0
"""Tensors of which each rank holds a shard (DTensor): gathering and dividing them, and norms of all their gradients.

`torch.distributed.tensor` is slow to import and is used only once a model was sharded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def is_shard(value: object) -> bool:
    """True if `value` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def has_shards(values: Iterable[object]) -> bool:
    """True if one of `values` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None:
        for value in values:  # a generator would cost more than all the rest: this runs in each update
            if isinstance(value, kind):
                return True
    return False


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, which shares its memory; `tensor` itself if it is not sharded."""
    return local_parts([tensor])[0]


@torch.no_grad()
def local_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `local_part` of each of `tensors`."""
    # With gradients, or after detach(), to_local() is a dispatched operation, which costs 30 times as much.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return [one.to_local() if isinstance(one, kind) else one for one in tensors]


def gather(value: Any, *, keeps: bool) -> Any:
    """Return the whole tensor on the CPU if `keeps`, else None; a value that is not sharded as it is.

    Collective for a sharded tensor.
    """
    if not is_shard(value):
        return value
    whole = value.detach().to(value.device_mesh.device_type).full_tensor()
    return whole.cpu() if keeps else None


def divide_as(own: Any, value: Any) -> Any:
    """Return this rank's shard of the whole tensor `value`, divided as `own` is. Not collective.

    Returns `value` itself if `own` is not sharded or has another shape.
    """
    if not is_shard(own) or not isinstance(value, torch.Tensor) or is_shard(value) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.detach().to(own.device_mesh.device_type)
    divided = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
    return divided.to(own.device)  # the CPU if it is offloaded


def is_true_everywhere(flag: torch.Tensor | bool, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `flag` (shape ()) combined over the ranks that share the sharded tensors `like`: 1 or 0. Collective.

    The result is on the device of the ranks' group, shape () and float32.
    """
    mesh = _mesh(like)
    lowest = torch.as_tensor(flag, dtype=torch.float32, device=mesh.device_type)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group())
    return lowest


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all `gradients`, the same on every rank. Collective if one of them is sharded.

    `norm_type`: above 0, or inf.
    """
    if not has_shards(gradients):
        return nn.utils.get_total_norm(gradients, norm_type)
    device, is_largest = local_part(gradients[0]).device, norm_type == math.inf
    norms = torch.zeros(2, dtype=torch.float64, device=device)  # of the shards, and of gradients that are whole
    for place, parts in enumerate(_split(gradients)):
        filled = [one for one in parts if one.numel()]
        if filled:
            norms[place] = nn.utils.get_total_norm(filled, norm_type).double()
    # The maximum of a number and NaN may be the number.
    powers = norms.nan_to_num(nan=math.inf, posinf=math.inf) if is_largest else norms.pow(norm_type)
    mesh = _mesh(gradients)
    of_shards = powers[:1].to(mesh.device_type)
    dist.all_reduce(of_shards, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=mesh.get_group())
    powers[:1] = of_shards
    norm = powers.max() if is_largest else powers.sum().pow(1.0 / norm_type)
    return norm.to(gradients[0].dtype)


def clip(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply the gradients of `parameters` so that their `norm` is at most `max_norm`. Not collective."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not has_shards(gradients):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch does
    for part in local_parts(gradients):
        part.mul_(factor.to(part.dtype))


def clip_values(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Clamp each element of the gradients of `parameters` to at most `limit` in absolute value. Not collective."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if has_shards(gradients):
        for part in local_parts(gradients):
            part.clamp_(-limit, limit)
    else:
        nn.utils.clip_grad_value_(parameters, limit)


def _split(gradients: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shards = local_parts([one for one in gradients if is_shard(one)])
    return shards, [one for one in gradients if not is_shard(one)]


def _mesh(tensors: Sequence[Any]) -> Any:
    """Return the mesh of ranks that share them. With `cpu_offload`, its device is not that of the tensors."""
    return next(one.device_mesh for one in tensors if is_shard(one))
