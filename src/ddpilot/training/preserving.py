# SPDX-License-Identifier: Apache-2.0
"""Try steps on a model, and leave it, its optimizer and the random state as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.training.checkpoint.rng import capture_rng, restore_rng


@contextmanager
def preserved(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Whatever the body does to `model`, `optimizer` and this process's random states is undone, bit for bit.

    What is kept lies in CPU memory: a second model on the device would leave less room there than training has. The
    tensors stay the same objects. Gradients are None in the body.
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
    """An optimizer's state of one parameter: its objects, each with what is in it."""
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
