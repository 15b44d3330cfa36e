# SPDX-License-Identifier: Apache-2.0
"""Detects parameters that are trained without `prepare`, whose gradients would not be all-reduced."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.errors import LoopError
from ddpilot.training.models.ddp import class_name


class PreparedWatch:
    """Tracks the parameters of prepared models. Models and optimizers are checked once, not in every step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: set[int] = set()
        self._models: WeakSet[nn.Module] = WeakSet()
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def add(self, model: nn.Module) -> None:
        """Add all current parameters of `model`, which was prepared."""
        self._known |= set(map(id, model.parameters()))

    def check_models(self, models: tuple[nn.Module, ...]) -> None:
        """Raise LoopError if one of `models` has trainable parameters that belong to no prepared model."""
        for model in models:
            if model not in self._models:
                named = model.named_parameters()
                if unknown := [name for name, one in named if one.requires_grad and id(one) not in self._known]:
                    raise self._refuse_model(model, unknown)
                self._models.add(model)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise LoopError if `optimizer` holds such parameters. Checks again after it got more groups."""
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            unknown = [one for one in _parameters(optimizer) if one.requires_grad and id(one) not in self._known]
            if unknown:
                raise self._refuse_optimizer(optimizer, unknown)
            self._groups[optimizer] = len(optimizer.param_groups)

    def _refuse_model(self, model: nn.Module, names: list[str]) -> LoopError:
        fix = "Write model = loop.prepare(model) before the loop, and pass what it returns."
        if self._known:
            fix += " A layer that is put into a model belongs there before that."
        return LoopError(
            "accumulating gradients",
            found=f"{_some(names)} of this {class_name(model)} went through no prepare(), so each rank would train "
            "them by itself",
            fix=fix,
            rank=self._rank,
        )

    def _refuse_optimizer(self, optimizer: Optimizer, unknown: list[torch.Tensor]) -> LoopError:
        num = sum(1 for _ in _parameters(optimizer))
        return LoopError(
            "updating the weights",
            found=f"{len(unknown)} of the {num} parameters of this {type(optimizer).__name__} (shapes "
            f"{_some([str(tuple(one.shape)) for one in unknown])}) are in no model that went through prepare(), so "
            "each rank would train them by itself",
            fix="Write model, optimizer = loop.prepare(model, optimizer), with every model that it trains; put a "
            "parameter that stands alone into a module. What is meant to differ between ranks takes optimizer.step().",
            rank=self._rank,
        )


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
