# SPDX-License-Identifier: Apache-2.0
"""Put a model on its device and into DDP with options that are chosen here, and take it out again."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.training.accelerator import is_divided, move
from ddpilot.training.comm_hooks import check_compressible, compress, is_fp16
from ddpilot.training.ddp_options import HAS_FORWARD_SYNC, Choice, DdpOptions, resolve
from ddpilot.training.inside import PreparedDDP


def wrap(model: nn.Module, group: GroupLike, options: DdpOptions | None = None) -> tuple[nn.Module, tuple[Choice, ...]]:
    """`model` on the group's device, in DDP if there are several ranks and anything to train; and what was chosen.

    A model on several devices stays there. Collective with several ranks. Raises LoopError for a model that is in DDP
    already, and for options that do not go with it.
    """
    options = options or DdpOptions()
    if isinstance(model, DistributedDataParallel):
        raise LoopError(
            "preparing a model",
            found="it is a DistributedDataParallel already",
            fix="Pass the model itself: prepare() wraps it.",
            rank=group.rank,
        )
    if options.comm is not None:
        check_compressible(model, options.comm, group.rank)
    if options.sync_batch_norm:
        model = _with_synced_batch_norm(model, group)
    if not is_divided(model, group.device):
        move(model, group.device)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if group.world_size == 1 or not trains or not isinstance(group, Group):
        return model, ()
    arguments, choices = resolve(options, model, group, os.environ)
    wrapped = PreparedDDP(model, **arguments)
    if options.comm is not None:
        compress(wrapped, options.comm)
    if not HAS_FORWARD_SYNC:  # without it, older versions of torch do not make buffers equal here
        sync_buffers(model, group)
    return wrapped, tuple(choices)


def prepare_optimizer(optimizer: Optimizer, group: GroupLike, shard: str | None = None) -> Optimizer:
    """`optimizer`, or with `shard="optimizer"` one that divides its state among ranks. LoopError for another value."""
    if shard is None:
        return optimizer
    if shard != "optimizer":
        raise LoopError(
            "preparing an optimizer",
            found=f"`shard` is {shard!r}",
            fix='Use shard="optimizer", which divides the state of the optimizers among ranks, or None.',
            rank=group.rank,
        )
    from ddpilot.training.sharding import shard_optimizer

    return shard_optimizer(optimizer, group)


def _with_synced_batch_norm(model: nn.Module, group: GroupLike) -> nn.Module:
    if group.device.type == "cpu":
        raise LoopError(
            "preparing a model with `sync_batch_norm=True`",
            found="torch's SyncBatchNorm runs on GPUs only, and this rank's device is the CPU",
            fix="Use GroupNorm or LayerNorm, which need no statistics of a batch, or leave it out on the CPU.",
            rank=group.rank,
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model that `model` is, or that `torch.compile` was given; None where there is none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, also inside `torch.compile(ddp)` and an `AveragedModel(ddp)`; else `model` itself.

    The same weights and no collective: for a forward pass from which no gradient of its own is to cross, for methods
    other than `forward`, and for changing the model before it is prepared again. Not collective.
    """
    if isinstance(model, DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, AveragedModel) else None)
    return unwrap(inner) if isinstance(inner, DistributedDataParallel) else model


def class_name(model: nn.Module) -> str:
    """What the user calls the model: of the one inside DDP, and inside `torch.compile`."""
    inner = unwrap(model)
    return type(getattr(inner, "_orig_mod", inner)).__name__


def crosses_as_fp16(model: nn.Module) -> bool:
    """Was `model` prepared with `comm="fp16"`, in which a gradient above 65,504 becomes infinite?"""
    ddp = find_ddp(model)
    return ddp is not None and is_fp16(ddp)


def sync_buffers(model: nn.Module, group: GroupLike, src: int = 0) -> None:
    """Make every buffer of `model` on all ranks what it is on rank `src`, in one broadcast. Collective.

    Buffers may be on any device: their bytes travel from and to that of the group.
    """
    buffers = [buffer for buffer in unwrap(model).buffers() if buffer.numel()]
    if group.world_size == 1 or not buffers:
        return
    device = group.device
    flat = torch.cat([one.detach().to(device).reshape(-1).contiguous().view(torch.uint8) for one in buffers])
    group.broadcast(flat, src)
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    with torch.no_grad():
        for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
            # A part may begin at an address that its dtype cannot be read from.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
