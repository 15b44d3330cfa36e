# SPDX-License-Identifier: Apache-2.0
"""Find when the last gradient of a backward pass was computed: from then on it waits for DDP's all_reduces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ddpilot.guard.probe import Notes

_NUM_OBSERVED = 2
"""Backward passes of which the order of all gradients is observed; later only the last ones are."""


class GradientEnds:
    """The times at which gradients of DDP models are ready."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._models: WeakSet[Any] = WeakSet()
        self._ready_ns = 0
        self._last: Any = None
        self._num_passes = 0
        self._handles: dict[int, Any] = {}

    def add(self, ddp: Any) -> None:
        """Observe the parameters of `ddp`."""
        self._models.add(ddp)
        self._num_passes = 0
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._notes.safely(self._make_hook(parameter)))
                self._handles[id(parameter)] = hook

    def remove(self) -> None:
        """Stop observing."""
        while self._handles:
            self._handles.popitem()[1].remove()

    def _make_hook(self, parameter: Any) -> Callable[[Any], None]:
        def is_ready(_: Any) -> None:
            self._ready_ns = time.monotonic_ns()
            self._last = id(parameter)

        return is_ready

    def begin(self) -> None:
        """Call before a backward pass."""
        self._ready_ns = 0

    def end(self) -> int:
        """Call after a backward pass; returns when its last gradient was ready, 0 if nothing was reduced in it."""
        ready_ns = self._ready_ns
        if not ready_ns or not any(ddp.require_backward_grad_sync for ddp in self._models):
            return 0
        self._num_passes += 1
        if self._num_passes == _NUM_OBSERVED:
            for key in [each for each in self._handles if each != self._last]:
                self._handles.pop(key).remove()
        return ready_ns
