# SPDX-License-Identifier: Apache-2.0
"""Run any function of a model as the forward pass of its DDP, so that its methods and parts train like `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class PreparedDDP(DistributedDataParallel):
    """DDP with the public methods and attributes of the model inside, so that a program is the same on one rank.

    A method runs as a forward pass of DDP: the gradients of what it returns cross between ranks.
    """

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and model is not None:  # asked for in every forward pass
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
    """In the model's place inside DDP for one forward pass, so that hooks of the model run as without DDP.

    It holds the model, for hooks of DDP that look at parameters.
    """

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.model = model

    def forward(self, _: None) -> Any:
        return self._function()


def run_inside(wrapped: Any, function: Callable[[Any], Any]) -> Any:
    """`function(model)`, of the user's own model, between what DDP does before and after a forward pass.

    Without DDP, of `wrapped` itself. What DDP looks for in the output (`find_unused_parameters`) it finds in what
    `function` returns: tensors, and tuples and dicts of them.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return function(wrapped)
    model: nn.Module = wrapped.module

    def call() -> Any:
        wrapped.module = model
        return function(model)

    wrapped.module = _Once(call, model)
    try:
        return wrapped(None)  # with `device_ids`, torch fails for a call without any argument
    finally:
        wrapped.module = model
