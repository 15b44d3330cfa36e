# SPDX-License-Identifier: Apache-2.0
"""`preserved`: runs trial steps on a model, then restores the model, its optimizer and the random states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.group.rng import capture_rng, restore_rng


@contextmanager
def preserved(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Restore `model`, `optimizer` and this process's random states after the block, bit for bit.

    The copies are in CPU memory: on the device, a second model would leave less room than training has. The tensors
    remain the same objects. Gradients are None in the block.
    """
    rng = capture_rng(device)
    tensors = [*model.parameters(), *model.buffers()]
    kept = [_to_host(tensor) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(layer, layer.training) for layer in model.modules()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [(key, entries, _keep(entries)) for key, entries in optimizer.state.items()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for tensor, host in zip(tensors, kept, strict=True):
                tensor.copy_(host)
            optimizer.state.clear()
            optimizer.state.update({key: _put_back(entries, host) for key, entries, host in states})
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for layer, was_training in modes:
            layer.training = was_training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_rng(rng, device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _keep(entries: Any) -> Any:
    """Return an optimizer's state of one parameter: its objects, each with a copy of its contents."""
    if not isinstance(entries, dict):
        return copy.deepcopy(entries)
    return {
        name: (value, _to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in entries.items()
    }


def _put_back(entries: Any, kept: Any) -> Any:
    if not isinstance(entries, dict):
        return kept
    entries.clear()
    for name, (value, inside) in kept.items():
        entries[name] = value.copy_(inside) if isinstance(value, torch.Tensor) else inside
    return entries
