# SPDX-License-Identifier: Apache-2.0
"""Time the forward pass of the outermost modules, and find when the last gradient of a backward pass was computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes

_NUM_OBSERVED = 2
"""Backward passes of a model of which the order of all gradients is observed; later only the last ones are."""


class _ModelGradients:
    """The gradients of one model."""

    def __init__(self) -> None:
        self.last: Any = None
        """The parameter whose gradient came last in this pass; None if the pass is not of this model."""
        self.num_passes = 0
        self.num_reduced = 0
        """Passes of this update after which the gradients were exchanged."""
        self.handles: dict[int, Any] = {}


class GradientEnds:
    """The times at which gradients of DDP models are ready."""

    def __init__(self, notes: Notes, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._notes = notes
        self._clock = clock
        self._models: WeakKeyDictionary[Any, _ModelGradients] = WeakKeyDictionary()
        self._ready_ns = 0

    def add(self, ddp: Any) -> None:
        """Observe the parameters of `ddp`."""
        found = self._models[ddp] = _ModelGradients()
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                hook = self._notes.safely(self._make_hook(found, id(parameter)))
                found.handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)

    def remove(self) -> None:
        """Stop observing."""
        for found in self._models.values():
            while found.handles:
                found.handles.popitem()[1].remove()

    def _make_hook(self, found: _ModelGradients, key: int) -> Callable[[Any], None]:
        def is_ready(_: Any) -> None:
            self._ready_ns = self._clock()
            found.last = key

        return is_ready

    def begin(self) -> None:
        """Call before a backward pass."""
        self._ready_ns = 0
        for found in self._models.values():
            found.last = None

    def end(self) -> tuple[int, list[Any]]:
        """Call after a backward pass; returns when its last gradient was ready, and the models that it reduced."""
        reduced = []
        for ddp, found in self._models.items():
            if found.last is None:
                continue
            found.num_passes += 1
            if found.num_passes == _NUM_OBSERVED:
                for key in [each for each in found.handles if each != found.last]:
                    found.handles.pop(key).remove()
            if ddp.require_backward_grad_sync:
                found.num_reduced += 1
                reduced.append(ddp)
        return self._ready_ns if reduced else 0, reduced

    def take_reductions(self) -> int:
        """Return how often the gradients of a model were exchanged in this update, at most; the next one begins."""
        most = max((found.num_reduced for found in self._models.values()), default=0)
        for found in self._models.values():
            found.num_reduced = 0
        return most


class OutermostModules:
    """Finds the outermost modules in the first update, by hooks on all modules; later only these have hooks.

    The module inside DDP has them too, since programs evaluate it without DDP.

    `add`: called with the begin and end of each forward pass, in ns on CLOCK_MONOTONIC.
    """

    def __init__(
        self, notes: Notes, add: Callable[[int, int], None], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._notes = notes
        self._clock = clock
        self._add = add
        self._main = threading.main_thread().ident
        self._open: list[tuple[int, int]] = []  # id of the module, begin
        self._handles: list[Any] = []
        self._known: set[int] = set()

    def install(self) -> list[Callable[[], None]]:
        """Start looking for modules; returns the functions that stop it."""
        modules = torch.nn.modules.module
        self._everywhere = [
            modules.register_module_forward_pre_hook(self._notes.safely(self._begins)),
            modules.register_module_forward_hook(self._notes.safely(self._ends), always_call=True),
        ]
        return [self._remove]

    @property
    def is_first(self) -> bool:
        """True as long as all modules have hooks. Set to False after the first update."""
        return bool(self._everywhere)

    @is_first.setter
    def is_first(self, value: bool) -> None:
        while self._everywhere and not value:
            self._everywhere.pop().remove()

    def _remove(self) -> None:
        self.is_first = False
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, module: Any, *_: Any) -> None:
        if threading.get_ident() == self._main:
            self._open.append((id(module), 0 if self._open else self._clock()))

    def _ends(self, module: Any, *_: Any) -> None:
        if not self._open or self._open[-1][0] != id(module) or threading.get_ident() != self._main:
            return
        begin_ns = self._open.pop()[1]
        if self._open:
            return
        self._add(begin_ns, self._clock())
        if self._everywhere:
            self._observe(module)
            inner = module.module if isinstance(module, DistributedDataParallel) else None
            if inner is not None and inner._compiled_call_impl is None:  # the compiler would trace its hooks
                self._observe(inner)

    def _observe(self, module: Any) -> None:
        if id(module) in self._known:
            return
        self._known.add(id(module))
        begins, ends = self._notes.safely(self._begins_alone), self._notes.safely(self._ends_alone)
        self._handles.append(module.register_forward_pre_hook(_ModuleHook(begins)))
        self._handles.append(module.register_forward_hook(_ModuleHook(ends), always_call=True))

    def _begins_alone(self, module: Any, args: Any) -> None:
        if not self._everywhere:
            self._begins(module, args)

    def _ends_alone(self, module: Any, *_: Any) -> None:
        if not self._everywhere:
            self._ends(module)


class _ModuleHook:
    """A hook of a module that the program may copy or pickle; the pickled one does nothing and needs no ddpilot."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, _: Any) -> _ModuleHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and returns None
