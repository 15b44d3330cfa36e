# SPDX-License-Identifier: Apache-2.0
"""Call any method of a model outside of training, without side effects on the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot.data.devices import to_device
from ddpilot.errors import LoopError
from ddpilot.training.evaluation.evaluate import eval_mode
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.nested import to_host


def call_model(model: nn.Module, method: str, *args: Any, device: torch.device, **kwargs: Any) -> Any:
    """Return `model.method(*args, **kwargs)` with tensors on the CPU; tensors in the arguments are moved to `device`.

    The model runs unwrapped, in eval mode and without gradients. Not collective. Raises LoopError if it has no such
    method.
    """
    inner = find_inner(model)
    function = getattr(inner, method, None)
    if not callable(function):
        raise LoopError(
            f"calling `{method}` of the model",
            found=f"{type(inner).__name__} has no such method",
            fix="Give the name of one of its methods, such as 'forward'.",
        )
    if method == "forward":  # includes its hooks
        function = inner
    with eval_mode(inner), torch.no_grad():
        return to_host(function(*to_device(args, device), **to_device(kwargs, device)))


def find_inner(model: nn.Module) -> nn.Module:
    """Return the user's own module: unwrapped from DDP, and from an AveragedModel the averaged copy."""
    inner = unwrap(model)
    return inner.module if isinstance(inner, AveragedModel) else inner


def trained_parts(model: nn.Module) -> dict[str, nn.Module] | None:
    """Return the modules of a ModuleDict by name, which are trained as separate models; None for any other model.

    A ModuleDict subclass that defines `forward` is one model.
    """
    is_container = isinstance(model, nn.ModuleDict) and type(model).forward is nn.Module.forward
    return dict(model.named_children()) if is_container else None
