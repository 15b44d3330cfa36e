# SPDX-License-Identifier: Apache-2.0
"""Calls methods other than `forward` through DistributedDataParallel, so that their gradients are all-reduced too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
        return lambda *args, **kwargs: run_inside(self, lambda inner: getattr(inner, name)(*args, **kwargs))


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


def run_inside(wrapped: Any, function: Callable[[Any], Any]) -> Any:
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
