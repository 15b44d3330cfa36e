# SPDX-License-Identifier: Apache-2.0
"""Find when the last gradient of a backward pass was computed: from then on it waits for DDP's all_reduces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

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
