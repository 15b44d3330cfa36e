# SPDX-License-Identifier: Apache-2.0
"""Detects gradients that are not all-reduced: forward passes that bypassed DDP, and parameters never prepared."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import LoopError, list_names
from ddpilot.training.loss_weights import walk
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.registry import OptimizerRecord, PreparedObjects, is_finished

_NOTE = "require_forward_param_sync"
_UNUSED = "not used since this update began"
_BEFORE = "used before an earlier backward pass, and not since"
_NUM_GRAPHS = 3
"""Number of updates in which autograd graphs are searched: such a mistake shows from the first update on."""
# DDP sets this attribute in every forward pass and only tests its truth value; these strings are true. A hook would
# cost a microsecond per forward pass, and torch.compile would trace it.


class ForwardBypassCheck:
    """Tracks which DDP models were called in an update, at no cost in the forward pass."""

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._num_updates = 0

    @property
    def checks_graphs(self) -> bool:
        """True if the autograd graphs of this update are to be checked: in the first updates, if a model is in DDP."""
        return self._num_updates <= _NUM_GRAPHS and bool(self._prepared.ddp_models)

    def begin(self) -> None:
        """Mark all models as not called: the forward passes of an update's last batch follow. Not collective."""
        self._num_updates += 1
        for model in self._prepared.ddp_models:
            model.__dict__[_NOTE] = _UNUSED  # a tenth of the cost of Module.__setattr__

    def check_graph(self, losses: Iterable[torch.Tensor]) -> None:
        """Raise LoopError if `losses` depend on a forward pass that ran before an earlier backward pass.

        Call it before the backward pass. DDP all-reduces the gradients of the forward passes since the last
        all-reduce in one backward pass, and no gradients in a second one. Not collective.
        """
        reached = {id(getattr(node, "variable", None)) for node in walk(losses)}
        for model, prepared in self._prepared.ddp_models.items():
            if reached.isdisjoint(prepared.reduced_ids):
                continue
            if model.__dict__.get(_NOTE) is _BEFORE and is_finished(model):
                raise self._second_backward(model)
            if model.__dict__.get(_NOTE) is not _UNUSED:
                model.__dict__[_NOTE] = _BEFORE

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise LoopError if one of `parameters` has a nonzero gradient and its DDP model was not called.

        A parameter that belongs to several models is accepted if any of them was called. Not collective.
        """
        models = self._prepared.ddp_models
        if not models:
            return
        unused = [model for model in models if model.__dict__.get(_NOTE) is _UNUSED]
        if not unused:
            return
        reduced = frozenset[int]().union(*(one.reduced_ids for model, one in models.items() if model not in unused))
        owners = {one: model for model in unused for one in models[model].reduced_ids - reduced}
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) in owners and bool(parameter.grad.any()):
                raise self._bypassed(owners[id(parameter)])

    def find_reduced(self, parameters: Iterable[nn.Parameter]) -> nn.Module | None:
        """Return a model of which one of `parameters` has a gradient that was averaged over ranks, or None.

        DDP averages the gradients of a model that was called in this update, FSDP2 all gradients. Not collective.
        """
        given = {id(one) for one in parameters if one.grad is not None}
        for prepared in self._prepared.models:
            is_called = prepared.ddp is not None and prepared.ddp.__dict__.get(_NOTE) is not _UNUSED
            averaged = prepared.trained if prepared.is_sharded else prepared.reduced
            if (is_called or prepared.is_sharded) and not given.isdisjoint(map(id, averaged.values())):
                return prepared.module
        return None

    def check_all(self, models: Iterable[nn.Module]) -> None:
        """Run `check` on all parameters of `models`, unless one of their DDP models was called."""
        known = self._prepared.ddp_models
        if not known or all(model.__dict__.get(_NOTE) is not _UNUSED for model in known):
            return
        inner = {id(unwrap(model)) for model in models}
        given = [model for model, prepared in known.items() if id(prepared.module) in inner]
        if all(model.__dict__.get(_NOTE) is _UNUSED for model in given):
            self.check(parameter for model in given for parameter in model.module.parameters())

    def _second_backward(self, model: DistributedDataParallel) -> LoopError:
        name = class_name(model)
        return LoopError(
            "running backward",
            found=f"the forward pass of {name} behind this loss ran before another loop.backward(), which all-reduced "
            "the gradients of all its forward passes; those of this loss would not be all-reduced",
            fix="Add the losses and call loop.backward once, or by name: "
            'loop.backward({"a": loss_a, "b": (loss_b, count)}); or run each forward pass after the backward pass of '
            "the previous one.",
        )

    def _bypassed(self, model: DistributedDataParallel) -> LoopError:
        name = class_name(model)
        return LoopError(
            "updating the weights",
            found=f"{name} has gradients, but the {name} that prepare() returned was not called in this update, so "
            "they were not all-reduced: the ranks would train different models",
            fix="Call the model that prepare() returned, or one of its methods (in a Trainer: run.wrapped), not the "
            "original model, the result of unwrap() (run.model) or a part of the model. Use loss.backward() and "
            "optimizer.step() for a model that is meant to differ between ranks.",
        )


class UnpreparedCheck:
    """Detects trainable parameters that `prepare` does not know. Checks once per pass, not in every step."""

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._models: set[nn.Module] = set()

    def begin_pass(self) -> None:
        """Check every model again at its next use."""
        self._models.clear()

    def check_models(self, models: tuple[nn.Module, ...]) -> None:
        """Raise LoopError if one of `models` was not prepared, or had parameters frozen or unfrozen since.

        DDP keeps waiting for the gradients of the parameters that it was constructed with: without one of them it does
        not all-reduce their bucket, and the ranks diverge one step before DDP reports it. Not collective; the same on
        all ranks.
        """
        if self._models.issuperset(models):
            return
        for model in models:
            prepared = self._prepared.find(model)
            if prepared is not None and (changed := prepared.list_changed()):
                raise self._changed(changed)
            trained = ((name, id(one)) for name, one in model.named_parameters() if one.requires_grad)
            if unknown := [name for name, number in trained if number not in self._prepared.parameter_ids]:
                raise self._unprepared(model, unknown)
        self._models.update(models)

    def check_optimizer(self, optimizer: Optimizer, own: OptimizerRecord) -> None:
        """Raise LoopError if `optimizer`, of which `own` is the record, holds parameters of no prepared model.

        Raises LoopError also if a later optimizer has replaced it. Checks each record once.
        """
        if own.is_checked:
            return
        if optimizer in self._prepared.replaced:
            found = f"this {type(optimizer).__name__} was replaced: one that has all its parameters was prepared later"
            fix = "Step that one. If both are to be used, prepare them in one call: loop.prepare(first, second)."
            raise LoopError("updating the weights", found=found, fix=fix)
        parameters = own.parameters
        unknown = [one for one in parameters if one.requires_grad and id(one) not in self._prepared.parameter_ids]
        if unknown:
            raise LoopError(
                "updating the weights",
                found=f"{len(unknown)} of the {len(parameters)} parameters of this {type(optimizer).__name__} (shapes "
                f"{list_names([str(tuple(one.shape)) for one in unknown])}) belong to no model that was passed to "
                "prepare(): their gradients would not be averaged across ranks",
                fix="Write model, optimizer = loop.prepare(model, optimizer), with every model that it trains; put a "
                "single parameter into a module. Use optimizer.step() for parameters that are meant to differ between "
                "ranks.",
            )
        own.is_checked = True

    def _unprepared(self, model: nn.Module, names: list[str]) -> LoopError:
        fix = "Write model = loop.prepare(model) before the loop, and pass the returned model."
        if self._prepared.parameter_ids:
            fix += " Add layers to a model before that."
        return LoopError(
            "accumulating gradients",
            found=f"{list_names(names)} of this {class_name(model)} {_was(names)} never passed to prepare(): the "
            "gradients would not be averaged across ranks",
            fix=fix,
        )

    def _changed(self, names: list[str]) -> LoopError:
        return LoopError(
            "training a prepared model",
            found=f"{list_names(names)} {_was(names)} frozen or unfrozen after prepare(), which DDP does not support",
            fix="Do it before prepare(), or call model = loop.prepare(ddpilot.unwrap(model)) again after it. With a "
            "Trainer: between two fits.",
        )


def _was(names: list[str]) -> str:
    return "were" if len(names) > 1 else "was"
