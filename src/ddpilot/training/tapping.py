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

_NUM_KEPT = 64


class _Hook:
    """Of one parameter: keeps its gradients, and at first notes when they come. It keeps no loop in memory."""

    def __init__(self, taps: Taps, order: list[int], number: int) -> None:
        self._taps = weakref.ref(taps)
        self.order: list[int] | None = order
        self._number = number

    def __call__(self, gradient: torch.Tensor) -> None:
        taps = self._taps()
        if taps is None:
            return
        if self.order is not None:
            self.order.append(self._number)
        if taps.now is not None:
            taps.now.append(gradient if gradient.numel() <= _NUM_WHOLE else gradient.sum())


class _Watched(NamedTuple):
    order: list[int]
    """Numbers of parameters, as their gradients came in the first backward passes."""
    sizes: list[int]
    hooks: list[_Hook]
    stops: list[Callable[[], object]]


class Taps:
    """Keeps one small gradient of each model as this rank alone computed it, for a few updates.

    That of a parameter next to the input, as the first backward pass shows it: what becomes NaN on the way back reaches
    it. A hook on one parameter costs a microsecond or two in a backward pass, and nothing is computed or waited for
    until somebody asks.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._unsettled: set[int] = set()
        self._taken: deque[tuple[Where, list[torch.Tensor]]] = deque(maxlen=_NUM_KEPT)
        self.now: list[torch.Tensor] | None = None
        """Gradients of the backward pass at hand; None where they are not kept."""

    def watch(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Watch `module`, whose DDP waits for `parameters`; in place of what was watched there before."""
        for stop in self._watched.pop(id(module), _Watched([], [], [], [])).stops:
            stop()
        order: list[int] = []
        given = list(parameters)
        hooks = [_Hook(self, order, number) for number in range(len(given))]
        stops = [p.register_hook(hook).remove for p, hook in zip(given, hooks, strict=True)]  # type: ignore[no-untyped-call]
        for stop in stops:
            weakref.finalize(self, stop)  # the parameters may outlive the loop
        self._watched[id(module)] = _Watched(order, [p.numel() for p in given], hooks, stops)
        self._unsettled.add(id(module))

    def begin(self, batch: CurrentBatch | None) -> None:
        """A backward pass of this rank's samples of `batch` follows."""
        if not self._watched or batch is None:
            self.now = None
            return
        if self._unsettled and not (self._taken and self._taken[-1][0][:2] == (batch.epoch, batch.index)):
            self._settle()
        self.now = []
        self._taken.append(((batch.epoch, batch.index, batch.sample_ids), self.now))

    def _settle(self) -> None:
        """Go on with the smallest of the parameters of each model whose gradients came last, and no other."""
        for key in [key for key in self._unsettled if self._watched[key].order]:
            watched = self._watched[key]
            last = list(dict.fromkeys(reversed(watched.order)))[:_NUM_LAST]
            chosen = min(last, key=watched.sizes.__getitem__)
            for number, (hook, stop) in enumerate(zip(watched.hooks, watched.stops, strict=True)):
                hook.order = None
                if number != chosen:
                    stop()
            self._unsettled.discard(key)

    def pause(self) -> None:
        """A backward pass of no samples follows: what is NaN in it counts for nothing."""
        self.now = None

    def find(self, is_finite: Callable[[torch.Tensor], bool], before: tuple[int, int] | None) -> Where | None:
        """Where a gradient of this rank was not finite first: before that epoch and batch, or else at all."""
        bad = [where for where, gradients in self._taken if not all(map(is_finite, gradients))]
        earlier = [where for where in bad if before is None or where[:2] < before]
        return next(iter(earlier or bad), None)

    def forget(self) -> None:
        """Nothing that was kept is asked for any more."""
        self._taken.clear()
