# SPDX-License-Identifier: Apache-2.0
"""On which rank a gradient was not finite, though its loss was: DDP leaves only the sum over all ranks behind."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddpilot.training.grouping import CurrentBatch

Where = tuple[int, int, NDArray[np.int64]]
"""Epoch, batch, and numbers of this rank's samples."""

_NUM_LAST = 2
_NUM_WHOLE = 4096

_NUM_KEPT = 128
"""Batches and gradients together, beyond those of the batch at hand."""

_Kept = deque[Where | tuple[()] | torch.Tensor | None]
"""A batch, then the gradients of its backward passes, then the next; () before those that count for nothing. None is a
gradient that there is not: DDP passes it on for an output that the loss does not use."""


class _FirstHook:
    """Of one parameter, as long as it is not known whose gradients come last."""

    def __init__(self, kept: _Kept, order: list[int], number: int) -> None:
        self._kept, self._order, self._number = kept, order, number

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._order.append(self._number)
            self._kept.append(_small(gradient))


def _hook(kept: _Kept, size: int) -> Callable[[torch.Tensor], None]:
    """Of the one parameter that stays: where it can be, no line of Python runs between two layers."""
    return kept.append if size <= _NUM_WHOLE else lambda gradient: kept.append(_small(gradient))


def _small(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What is finite only if all of `gradient` is."""
    return gradient if gradient is None or gradient.numel() <= _NUM_WHOLE else gradient.sum()


class _Watched(NamedTuple):
    order: list[int]
    """Numbers of parameters, as their gradients came in the first backward passes."""
    parameters: list[nn.Parameter]
    stops: list[Callable[[], object]]


class Taps:
    """Keeps one small gradient of each model as this rank alone computed it, for a few updates.

    That of a parameter next to the input, as the first backward pass shows it: what becomes NaN on the way back reaches
    it. Nothing is computed or waited for until somebody asks.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._unsettled: set[int] = set()
        self._kept: _Kept = deque()
        self._last: tuple[int, int] | None = None

    def watch(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `module`, whose DDP waits for `parameters`; in place of what was watched there before."""
        order: list[int] = []
        given = list(parameters)
        self._unwatch(id(module))
        hooks = [_FirstHook(self._kept, order, number) for number in range(len(given))]
        stops = [self._listen(p, hook) for p, hook in zip(given, hooks, strict=True)]
        self._watched[id(module)] = _Watched(order, given, stops)
        self._unsettled.add(id(module))

    def _listen(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Callable[[], object]:
        """Call `hook` with gradients of `parameter`; returns what ends it, which the end of these taps does too."""
        stop: Callable[[], object] = parameter.register_hook(hook).remove  # type: ignore[no-untyped-call]
        weakref.finalize(self, stop)  # the parameter may outlive the loop
        return stop

    def _unwatch(self, key: int) -> None:
        for stop in self._watched.pop(key, _Watched([], [], [])).stops:
            stop()

    def begin(self, batch: CurrentBatch | None) -> None:
        """A backward pass of this rank's samples of `batch` follows."""
        if not self._watched or batch is None:
            self.pause()
            return
        at = batch.epoch, batch.index
        if self._unsettled and at != self._last:
            self._settle()
        self._last = at
        self._mark((*at, batch.sample_ids))

    def _settle(self) -> None:
        """Go on with the smallest of the parameters of each model whose gradients came last, and no other."""
        for key in [key for key in self._unsettled if self._watched[key].order]:
            order, parameters, _ = self._watched[key]
            last = list(dict.fromkeys(reversed(order)))[:_NUM_LAST]
            chosen = min((parameters[number] for number in last), key=nn.Parameter.numel)
            self._unwatch(key)
            stop = self._listen(chosen, _hook(self._kept, chosen.numel()))
            self._watched[key] = _Watched(order, parameters, [stop])
            self._unsettled.discard(key)

    def pause(self) -> None:
        """A backward pass of no samples follows: what is NaN in it counts for nothing."""
        self._mark(())

    def _mark(self, where: Where | tuple[()]) -> None:
        while len(self._kept) > _NUM_KEPT:
            self._kept.popleft()
        self._kept.append(where)

    def find(self, is_finite: Callable[[torch.Tensor], bool], before: tuple[int, int] | None) -> Where | None:
        """Where a gradient of this rank was not finite first: before that epoch and batch, or else at all."""
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
        """Nothing that was kept is asked for any more."""
        self._kept.clear()
