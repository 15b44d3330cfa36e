# SPDX-License-Identifier: Apache-2.0
"""Notices gradients that no DDP knows of: of a forward pass that went round it, which each rank would train alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import LoopError
from ddpilot.training.losses import walk
from ddpilot.training.reduction import is_finished
from ddpilot.training.wrapping import class_name, unwrap

_NOTE = "require_forward_param_sync"
_UNUSED = "not used since this update began"
_BEFORE = "used before an earlier backward pass, and not since"
_NUM_LOOKS = 3
"""Updates in which graphs are walked: what a program does wrong it does from the beginning."""
# DDP sets that attribute in every forward pass, and asks only whether it is true, as this text is. A hook would cost
# every forward pass a microsecond, and torch.compile would look into it.


class BypassWatch:
    """Whether the DDP models of a loop were called in an update, at no cost in the forward pass."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._models: dict[DistributedDataParallel, frozenset[int]] = {}
        self._num_updates = 0

    @property
    def looks_at_graphs(self) -> bool:
        """True in the first updates."""
        return self._num_updates <= _NUM_LOOKS and bool(self._models)

    def watch(self, model: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `model`, whose reducer waits for `parameters`; in place of another DDP of the same module."""
        self._models = {known: ids for known, ids in self._models.items() if known.module is not model.module}
        self._models[model] = frozenset(map(id, parameters))

    def begin(self) -> None:
        """The forward passes of an update's last batch are to come. Not collective."""
        self._num_updates += 1
        for model in self._models:
            model.__dict__[_NOTE] = _UNUSED  # at a tenth of the cost of a module's own way

    def check_graph(self, losses: Iterable[torch.Tensor]) -> None:
        """Before a backward pass of `losses`: raise LoopError if it belongs to a forward pass before another backward.

        DDP exchanges the gradients of the forward passes since the last exchange in one backward pass, and none of a
        second one.
        """
        reached = {id(getattr(node, "variable", None)) for node in walk(losses)}
        for model, parameters in self._models.items():
            if reached.isdisjoint(parameters):
                continue
            if model.__dict__.get(_NOTE) is _BEFORE and is_finished(model):
                raise self._refuse_second(model)
            if model.__dict__.get(_NOTE) is not _UNUSED:
                model.__dict__[_NOTE] = _BEFORE

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise LoopError where `parameters` have gradients and the DDP that they are in was not called.

        A parameter that is in several models may have come through any of them. Not collective.
        """
        unused = [model for model in self._models if model.__dict__.get(_NOTE) is _UNUSED]
        if not unused:
            return
        crossed = frozenset[int]().union(*(ids for model, ids in self._models.items() if model not in unused))
        of = {one: model for model in unused for one in self._models[model] - crossed}
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) in of and bool(parameter.grad.any()):
                raise self._refuse(of[id(parameter)])

    def check_all(self, models: Iterable[nn.Module]) -> None:
        """The same for all parameters of `models`, unless one of the DDP models was called."""
        if all(model.__dict__.get(_NOTE) is not _UNUSED for model in self._models):
            return
        inner = {id(unwrap(model)) for model in models}
        asked = [model for model in self._models if id(unwrap(model)) in inner]
        if all(model.__dict__.get(_NOTE) is _UNUSED for model in asked):
            self.check(parameter for model in asked for parameter in model.module.parameters())

    def _refuse_second(self, model: DistributedDataParallel) -> LoopError:
        name = class_name(model)
        return LoopError(
            "running backward",
            found=f"the forward pass of {name} behind this loss ran before another loop.backward(), which exchanged "
            "the gradients of all its forward passes; those of this one would not cross between ranks",
            fix="Add the losses and call loop.backward once, or by name: "
            'loop.backward({"a": loss_a, "b": (loss_b, count)}); or run each forward pass after the backward of '
            "the one before.",
            rank=self._rank,
        )

    def _refuse(self, model: DistributedDataParallel) -> LoopError:
        name = class_name(model)
        return LoopError(
            "updating the weights",
            found=f"{name} has gradients, and the {name} that prepare() returned was not called in this update, so "
            "they did not cross between ranks: each rank would train by itself",
            fix="Call what prepare() returned, or one of its methods (of a Trainer: run.wrapped), and not the model as "
            "it was before, what unwrap() gives (run.model), or a part of it alone. What is meant to differ between "
            "ranks takes loss.backward() and optimizer.step().",
            rank=self._rank,
        )
