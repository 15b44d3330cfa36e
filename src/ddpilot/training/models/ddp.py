# SPDX-License-Identifier: Apache-2.0
"""Wraps models in DistributedDataParallel and unwraps them; methods as forward passes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, is_divided, move
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.comm_hooks import check_compressible, register, runs_alone
from ddpilot.training.models.ddp_options import HAS_FORWARD_SYNC, Choice, DDPOptions, resolve
from ddpilot.training.models.sharding import is_sharded


def wrap(model: nn.Module, group: GroupLike, options: DDPOptions | None = None) -> tuple[nn.Module, tuple[Choice, ...]]:
    """Move `model` to the group's device and wrap it in DDP; return it with the options chosen.

    Not wrapped with one rank, unless a hook changes its gradients, or if no parameter requires a gradient. A model on
    several devices stays there. Collective with several ranks. Raises LoopError for a model that is already in DDP, and
    for options that it does not support.
    """
    options = options or DDPOptions()
    if isinstance(model, DistributedDataParallel):
        raise LoopError(
            "preparing a model",
            found="it is already a DistributedDataParallel",
            fix="Pass the model itself: prepare() wraps it.",
        )
    if is_sharded(model):
        return model, ()
    if options.comm is not None:
        check_compressible(model, options.comm)
    if options.sync_batch_norm:
        model = _with_synced_batch_norm(model, group)
    if not is_divided(model, group.device):
        move(model, group.device)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    is_alone = group.world_size == 1 and not runs_alone(options.comm)
    if is_alone or not trains or not isinstance(group, Group):
        return model, ()
    arguments, choices = resolve(options, model, group, os.environ)
    wrapped = PreparedDDP(model, **arguments)
    if options.comm is not None:
        register(wrapped, options.comm)
    if not HAS_FORWARD_SYNC:  # without it, older versions of torch do not sync buffers at construction
        broadcast_tensors(model.buffers(), group)
    return wrapped, tuple(choices)


def _with_synced_batch_norm(model: nn.Module, group: GroupLike) -> nn.Module:
    if group.device.type == "cpu":
        raise LoopError(
            "preparing a model with `sync_batch_norm=True`",
            found="torch's SyncBatchNorm runs only on GPUs, and this rank's device is the CPU",
            fix="Use GroupNorm or LayerNorm, which need no batch statistics, or omit the option on the CPU.",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model that `model` is or that `torch.compile` wraps; None if there is none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, `torch.compile(ddp)` or `AveragedModel(ddp)`; else `model` itself. Not collective.

    The returned model has the same weights and runs no collectives. Use it for a forward pass whose gradients must not
    be all-reduced, for methods other than `forward`, and to change the model before it is prepared again.
    """
    if isinstance(model, DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, AveragedModel) else None)
    return unwrap(inner) if isinstance(inner, DistributedDataParallel) else model


def reduces_in_fp16(model: nn.Module) -> bool:
    """True if `model` was prepared with `comm="fp16"`, in which a gradient above 65,504 becomes infinite."""
    ddp = find_ddp(model)
    return ddp is not None and any(hook is default_hooks.fp16_compress_hook for hook, _ in ddp._comm_hooks)


class PreparedDDP(DistributedDataParallel):
    """DDP with the public methods and attributes of the wrapped model, so that programs also run on one rank unchanged.

    A method runs as a forward pass of DDP: the gradients of its result are all-reduced.
    """

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and model is not None:  # read in every forward pass
            return model
        try:
            return super().__getattr__(name)
        except AttributeError:
            if model is None or name.startswith("_"):
                raise
        value = getattr(model, name)
        if not inspect.ismethod(value):
            return value
        return lambda *args, **kwargs: run_in_forward(self, lambda inner: getattr(inner, name)(*args, **kwargs))


class _Once(nn.Module):
    """Replaces the model inside DDP for one forward pass, so that the hooks of the model run as without DDP.

    It holds the model, for hooks of DDP that read parameters.
    """

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.model = model

    def forward(self, _: None) -> Any:
        return self._function()


def run_in_forward(wrapped: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function(model)`, run as a forward pass of the DDP model `wrapped`; `model` is the wrapped module.

    If `wrapped` is not a DDP model, return `function(wrapped)`. With `find_unused_parameters`, DDP searches the result
    of `function`: tensors, and tuples and dicts of them.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return function(wrapped)
    model: nn.Module = wrapped.module

    def call() -> Any:
        wrapped.module = model
        return function(model)

    wrapped.module = _Once(call, model)
    try:
        return wrapped(None)  # with `device_ids`, torch fails for a call without arguments
    finally:
        wrapped.module = model
