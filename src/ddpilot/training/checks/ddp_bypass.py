# SPDX-License-Identifier: Apache-2.0
"""Detects gradients that are not all-reduced: forward passes that bypassed DDP, and parameters never prepared."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

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


class ForwardBypassCheck:
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


class UnpreparedCheck:
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
