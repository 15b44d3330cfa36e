# SPDX-License-Identifier: Apache-2.0
"""Detects gradients of forward passes that bypassed DistributedDataParallel, which would not be all-reduced."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import LoopError
from ddpilot.training.losses import walk
from ddpilot.training.models.ddp import class_name, unwrap
from ddpilot.training.models.reducer import is_finished

_NOTE = "require_forward_param_sync"
_UNUSED = "not used since this update began"
_BEFORE = "used before an earlier backward pass, and not since"
_NUM_LOOKS = 3
"""Number of updates in which autograd graphs are searched: such a mistake shows from the first update on."""
# DDP sets this attribute in every forward pass and only tests its truth value; these strings are true. A hook would
# cost a microsecond per forward pass, and torch.compile would trace it.


class BypassWatch:
    """Tracks which DDP models were called in an update, at no cost in the forward pass."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._models: dict[DistributedDataParallel, frozenset[int]] = {}
        self._num_updates = 0

    @property
    def looks_at_graphs(self) -> bool:
        """True if the autograd graphs of this update are to be checked: in the first updates, if a model is watched."""
        return self._num_updates <= _NUM_LOOKS and bool(self._models)

    def watch(self, model: DistributedDataParallel, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `model`, whose reducer expects `parameters`. Replaces an earlier DDP of the same module."""
        self._models = {known: ids for known, ids in self._models.items() if known.module is not model.module}
        self._models[model] = frozenset(map(id, parameters))

    def begin(self) -> None:
        """Mark all models as not called: the forward passes of an update's last batch follow. Not collective."""
        self._num_updates += 1
        for model in self._models:
            model.__dict__[_NOTE] = _UNUSED  # a tenth of the cost of Module.__setattr__

    def check_graph(self, losses: Iterable[torch.Tensor]) -> None:
        """Raise LoopError if `losses` depend on a forward pass that ran before an earlier backward pass.

        Call it before the backward pass. DDP all-reduces the gradients of the forward passes since the last
        all-reduce in one backward pass, and no gradients in a second one. Not collective.
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
        """Raise LoopError if one of `parameters` has a nonzero gradient and its DDP model was not called.

        A parameter that belongs to several models is accepted if any of them was called. Not collective.
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
        """Run `check` on all parameters of `models`, unless one of their DDP models was called."""
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
