# SPDX-License-Identifier: Apache-2.0
"""Detects wrong gradients: cleared too early, left from before a step, or of one forward pass twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import LoopError
from ddpilot.training.loss_weights import walk
from ddpilot.training.models.registry import OptimizerRecord, PreparedObjects, parameters_of


class ClearedGradientCheck:
    """Detects gradients of an accumulation group that were cleared before its update.

    It checks one parameter of each model for each optimizer, as optimizers clear the gradients of their own parameters.
    """

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._parts: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], list[list[nn.Parameter]]]]
        self._parts = WeakKeyDictionary()
        self._added: dict[nn.Module, list[_Added]] = {}

    def begin(self) -> None:
        """Forget all gradients: an accumulation group begins, or they were cleared on purpose."""
        self._added.clear()

    def check(self, batch: Any) -> None:
        """Raise LoopError if gradients of the group of `batch` were cleared. Waits for a GPU if one was modified."""
        for found in self._added.values():
            for one in found:
                if one.is_cleared():
                    raise LoopError(
                        "running backward",
                        found="the gradients of the earlier batches of this accumulation group (of "
                        f"{batch.group_size}) were cleared, by zero_grad() or by setting them to None, so the update "
                        "would leave those out",
                        fix="Remove optimizer.zero_grad(): loop.step(optimizer) clears the gradients after the update.",
                    )

    def note(self, models: Iterable[nn.Module]) -> None:
        """Record gradients of `models` after a backward pass, in place of those of an earlier one."""
        for model in models:
            self._added[model] = []
            for part in self._parts_of(model):
                first = next((one for one in part if one.grad is not None), None)
                if first is not None:
                    self._added[model].append(_Added(first, part))

    def note_step(self, optimizer: Optimizer) -> None:
        """Forget the gradients of `optimizer`, which were applied and cleared."""
        if optimizer not in self._prepared.optimizers:
            self._stepped.add(optimizer)
        if self._added:
            own = set(parameters_of(optimizer))
            for model, found in self._added.items():
                self._added[model] = [one for one in found if one.parameter not in own]

    def _parts_of(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """Return the parameters of `model` by optimizer, and as the last part those that no known optimizer holds."""
        prepared = self._prepared
        others = (one for one in self._stepped if one not in prepared.replaced and one not in prepared.optimizers)
        optimizers = [*prepared.optimizers, *others]
        sizes = [(id(one), _count(one)) for one in optimizers]
        known, parts = self._parts.get(model, (None, []))
        if known != sizes:
            rest, parts = dict.fromkeys(model.parameters()), []
            for optimizer in optimizers:
                own = set(parameters_of(optimizer))
                parts.append([one for one in model.parameters() if one in own])
                for one in parts[-1]:
                    rest.pop(one, None)
            parts = [part for part in (*parts, list(rest)) if part]
            self._parts[model] = sizes, parts
        return parts


class _Added:
    """The gradient of one parameter after a backward pass, in place of those of all parameters of `part`."""

    def __init__(self, parameter: nn.Parameter, part: list[nn.Parameter]) -> None:
        assert parameter.grad is not None  # checked by the caller
        self.parameter = parameter
        self._gradient, self._version = parameter.grad, parameter.grad._version
        self._part = part

    def is_cleared(self) -> bool:
        """True if the gradients were set to None, or all to zeros in place."""
        now = self.parameter.grad
        if now is None or now is not self._gradient or now._version == self._version:
            return now is None
        self._version = now._version
        # The gradient of a single parameter may be zero.
        return not any(one.grad is not None and bool(one.grad.any()) for one in (self.parameter, *self._part))


class LeftoverGradientCheck:
    """Detects gradients that remained after the step of a different optimizer and were added to since.

    A GAN's generator step leaves gradients in the discriminator, whose next update must not contain them. Gradients
    that no later backward pass adds to are not refused: several optimizers may step after one backward pass.
    """

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._left: dict[nn.Parameter, int] = {}  # with the version of the gradient
        self._added: set[nn.Parameter] = set()
        self._stepped: list[OptimizerRecord] = []  # at the end of the current accumulation group
        self._last: OptimizerRecord | None = None  # of the last step

    def begin_pass(self) -> list[RemovableHandle]:
        """Before a backward pass, forget gradients that were cleared, and record which of the rest it adds to.

        Remove the handles after the pass. Waits for a GPU only if a gradient was modified in place since the step.
        """
        if not self._left:
            return []
        self._left = {one: version for one, version in self._left.items() if _remains(one, version)}
        self._added &= self._left.keys()
        trained = [one for one in self._left if one.requires_grad]
        return [one.register_post_accumulate_grad_hook(self._note) for one in trained]  # type: ignore[no-untyped-call]

    def _note(self, parameter: torch.Tensor) -> None:
        self._added.add(parameter)  # type: ignore[arg-type]
        self._left[parameter] = parameter.grad._version  # type: ignore[index, union-attr]

    def check(self, optimizer: Optimizer, own: OptimizerRecord) -> None:
        """Raise LoopError if `optimizer`, with the record `own`, is about to apply such gradients. Not collective."""
        if not self._added:
            return
        applied = {one for one in own.parameters if one.grad is not None}
        for prepared in self._prepared.models:
            if not applied.isdisjoint(self._added.intersection(prepared.trained.values())):
                name = type(optimizer).__name__
                if self._last is not None and set(self._last.parameters) < set(own.parameters):
                    num = len(own.parameters)
                    raise self._added_error(num - len(self._last.parameters), num, name)
                raise self._error(class_name(prepared.model), name)

    def note_step(self, own: OptimizerRecord, *, in_group: bool = False) -> None:
        """Record which gradients remain after a step of an optimizer, whose `own` gradients were cleared.

        `in_group`: in an accumulation group of several batches, whose gradients remain for the steps of its end.
        """
        if in_group:
            self._stepped.append(own)
            return
        self._last = own
        if self._left:
            for parameter in own.parameters:
                self._left.pop(parameter, None)
            self._added &= self._left.keys()
        for parameter in own.others:
            if parameter.grad is not None:
                self._left[parameter] = parameter.grad._version

    def begin_group(self) -> None:
        """Record which gradients remain after the steps of the accumulation group that has ended."""
        stepped, self._stepped = self._stepped, []
        for own in stepped:
            self.note_step(own)

    def _added_error(self, num_added: int, num: int, optimizer: str) -> LoopError:
        return LoopError(
            "updating the weights",
            found=f"{num_added} of the {num} parameters of this {optimizer} were added after its last loop.step(), "
            "and their gradients contain those of earlier updates, which no optimizer applied or cleared",
            fix="Write optimizer.zero_grad() right after optimizer.add_param_group(...), before the next "
            "loop.backward().",
        )

    def _error(self, model: str, optimizer: str) -> LoopError:
        return LoopError(
            "updating the weights",
            found=f"the gradients of {model} contain those of a loop.backward() that ran before the last loop.step() "
            f"of a different optimizer, which clears only its own, so this {optimizer} would apply them, too",
            fix="Write optimizer.zero_grad() for this optimizer before the loop.backward() that computes its "
            "gradients, as in a plain PyTorch loop. If it is to apply the gradients of both, call loop.step() of the "
            "other optimizer after both, or optimizer.step() and optimizer.zero_grad() of this one.",
        )


class SharedParameterCheck:
    """Detects optimizers that step after one of the same parameters, which has applied and cleared their gradients.

    Both may be used in turn, each after a backward pass of its own.
    """

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._sharing: WeakKeyDictionary[Optimizer, WeakSet[Optimizer]] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()  # since the last backward pass
        self.has_shared = False
        """True if prepared optimizers share parameters; otherwise there is nothing to check."""

    def add(self, optimizer: Optimizer) -> None:
        """Find the prepared optimizers that share parameters with `optimizer`, which was just prepared."""
        own = set(parameters_of(optimizer))
        for other in self._prepared.optimizers:
            if other is not optimizer and not own.isdisjoint(parameters_of(other)):
                self.has_shared = True
                self._sharing.setdefault(optimizer, WeakSet()).add(other)
                self._sharing.setdefault(other, WeakSet()).add(optimizer)

    def begin_pass(self) -> None:
        """Forget the steps before a backward pass."""
        self._stepped.clear()

    def note_step(self, optimizer: Optimizer) -> None:
        """Record a step of `optimizer`, whose gradients were cleared."""
        if optimizer in self._sharing:
            self._stepped.add(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Raise LoopError if `optimizer` is about to step without gradients that a different one has cleared."""
        for other in self._sharing.get(optimizer, ()):
            if other in self._stepped:
                name, before = type(optimizer).__name__, type(other).__name__
                raise LoopError(
                    "updating the weights",
                    found=f"this {name} has parameters of a different optimizer ({before}), whose loop.step() applied "
                    "and cleared their gradients after the last loop.backward(), so this one would not change them",
                    fix="Give each parameter to one optimizer; or call loop.backward() before the step of each.",
                )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _remains(parameter: nn.Parameter, version: int) -> bool:
    """True if the gradient that had `version` was not cleared, by None or by zeros."""
    gradient = parameter.grad
    return gradient is not None and (gradient._version == version or bool(gradient.any()))


class RepeatedBackwardCheck:
    """Detects two backward passes through one forward pass: DDP all-reduces each gradient once per forward pass."""

    def __init__(self) -> None:
        self._nodes: set[Any] = set()
        self.has_graph = False
        """True if an earlier backward pass of the batch has retained its graph."""

    def begin(self) -> None:
        """Forget the graphs of the previous batch."""
        self._nodes.clear()
        self.has_graph = False

    def check(self, losses: Iterable[torch.Tensor], trained: Iterable[nn.Module], *, retains: bool) -> None:
        """Raise LoopError if an earlier backward pass ran through a part of the graph of `losses`.

        Call it before the backward pass of `losses`. Only parts that lead to trainable parameters of the models in
        `trained` count.
        """
        nodes = set(walk(losses))
        if shared := nodes & self._nodes:
            known = {id(one) for model in trained for one in model.parameters() if one.requires_grad}
            inner = {following for node in shared for following, _ in node.next_functions}
            if any(id(getattr(node, "variable", None)) in known for node in inner):
                raise LoopError(
                    "running backward",
                    found="an earlier backward pass of this batch (with retain_graph=True) went through the same "
                    "forward pass, whose gradients are all-reduced once",
                    fix='Add the losses and call backward once; or loop.backward({"a": loss_a, "b": (loss_b, count)}) '
                    "if they are means over different items.",
                )
        if retains:
            self._nodes |= nodes
            self.has_graph = True
