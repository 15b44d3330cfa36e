# SPDX-License-Identifier: Apache-2.0
"""Records which rank produced a gradient that is not finite, before DDP's all-reduce hides it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddpilot.training.batches import CurrentBatch

Where = tuple[int, int, NDArray[np.int64]]
"""Epoch, batch, and indices of this rank's samples."""

_NUM_LAST = 2
_NUM_WHOLE = 4096

_NUM_KEPT = 128
"""Maximum number of entries, batches and gradients together, without those of the current batch."""

_Kept = deque[Where | tuple[()] | torch.Tensor | None]
"""A batch, followed by the gradients of its backward passes, then the next batch; () before gradients to ignore. None
is a missing gradient: DDP passes None for an output that the loss does not use."""


class _FirstHook:
    """Hook of one parameter that records the order of gradients, until the last ones are known."""

    def __init__(self, kept: _Kept, order: list[int], number: int) -> None:
        self._kept, self._order, self._number = kept, order, number

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._order.append(self._number)
            self._kept.append(_small(gradient))


def _hook(kept: _Kept, size: int) -> Callable[[torch.Tensor], None]:
    """Return the hook of the one parameter that remains watched; for a small one, no Python code runs in backward."""
    return kept.append if size <= _NUM_WHOLE else lambda gradient: kept.append(_small(gradient))


def _small(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return `gradient`, or its sum if it is large: not finite whenever an element is not finite."""
    return gradient if gradient is None or gradient.numel() <= _NUM_WHOLE else gradient.sum()


class _Watched(NamedTuple):
    order: list[int]
    """Indices of parameters in the order of their gradients in the first backward passes."""
    parameters: list[nn.Parameter]
    stops: list[Callable[[], object]]


class Taps:
    """Keeps a small local gradient of each model, from before the all-reduce, for a few updates.

    It belongs to a parameter close to the input, determined in the first backward pass: a NaN that appears anywhere in
    backward reaches it. Nothing is computed or waited for until `find`.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._unsettled: set[int] = set()
        self._kept: _Kept = deque()
        self._last: tuple[int, int] | None = None

    def watch(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `module`, whose DDP waits for `parameters`; replaces an earlier watch of the same module."""
        order: list[int] = []
        given = list(parameters)
        self._unwatch(id(module))
        hooks = [_FirstHook(self._kept, order, number) for number in range(len(given))]
        stops = [self._listen(p, hook) for p, hook in zip(given, hooks, strict=True)]
        self._watched[id(module)] = _Watched(order, given, stops)
        self._unsettled.add(id(module))

    def _listen(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Callable[[], object]:
        """Register `hook` on `parameter`.

        Returns a function that removes it, which is also called when this object is garbage-collected.
        """
        stop: Callable[[], object] = parameter.register_hook(hook).remove  # type: ignore[no-untyped-call]
        weakref.finalize(self, stop)  # the parameter may outlive the loop
        return stop

    def _unwatch(self, key: int) -> None:
        for stop in self._watched.pop(key, _Watched([], [], [])).stops:
            stop()

    def begin(self, batch: CurrentBatch | None) -> None:
        """Announce a backward pass of this rank's samples of `batch`."""
        if not self._watched or batch is None:
            self.pause()
            return
        at = batch.epoch, batch.index
        if self._unsettled and at != self._last:
            self._settle()
        self._last = at
        self._mark((*at, batch.sample_ids))

    def _settle(self) -> None:
        """For each model, keep watching only the smallest of the parameters whose gradients came last."""
        for key in [key for key in self._unsettled if self._watched[key].order]:
            order, parameters, _ = self._watched[key]
            last = list(dict.fromkeys(reversed(order)))[:_NUM_LAST]
            chosen = min((parameters[number] for number in last), key=nn.Parameter.numel)
            self._unwatch(key)
            stop = self._listen(chosen, _hook(self._kept, chosen.numel()))
            self._watched[key] = _Watched(order, parameters, [stop])
            self._unsettled.discard(key)

    def pause(self) -> None:
        """Announce a backward pass without samples, whose gradients are ignored."""
        self._mark(())

    def _mark(self, where: Where | tuple[()]) -> None:
        while len(self._kept) > _NUM_KEPT:
            self._kept.popleft()
        self._kept.append(where)

    def find(self, is_finite: Callable[[torch.Tensor], bool], before: tuple[int, int] | None) -> Where | None:
        """Return where a gradient of this rank was first not finite, preferably `before` that epoch and batch."""
        bad: list[Where] = []
        where: Where | None = None
        for one in self._kept:
            if isinstance(one, tuple):
                where = one or None
            elif one is not None and where is not None and not is_finite(one):
                bad.append(where)
        earlier = [where for where in bad if before is None or where[:2] < before]
        return next(iter(earlier or bad), None)

    def forget(self) -> None:
        """Clear the recorded gradients."""
        self._kept.clear()
