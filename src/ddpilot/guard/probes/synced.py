# SPDX-License-Identifier: Apache-2.0
"""Detect gradient accumulation in which every backward is reduced, although one reduction per step would do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

NUM_STEPS = 8
"""Number of consecutive steps that have to accumulate this way before it is noted."""

_MAX_OTHERS = 3
_MAX_BACKWARDS = 1024


class SyncedBackwards:
    """Follows the first steps of one DDP model, until 3 steps have not accumulated, as in most programs.

    Only backwards at one line count: two lines are two losses. Gradients that are cleared, read or added in between do
    not accumulate.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.num_bytes = sum(one.numel() * one.element_size() for one in parameters)
        self.is_over = False
        self._num_others = 0
        self._clear()
        self._nums: list[int] = []
        self.facts: dict[str, Any] = {}
        """What to note; empty until it is known."""

    @property
    def is_nearly_known(self) -> bool:
        """True if the step after the next backward may be the last one that has to be observed."""
        return len(self._nums) == NUM_STEPS - 1 and not self._lines

    def _clear(self) -> None:
        self._lines: list[tuple[str, int]] = []
        self._adds_up = True
        self._left: Any = None

    def backward(self, line: tuple[str, int], before: Any, after: Any, *, is_reduced: bool) -> None:
        """Count a backward at `line` with the gradient states before and after it, from `DdpModel.gradient_state`."""
        if self._lines:
            self._adds_up &= before == self._left
        self._adds_up &= is_reduced and len(self._lines) < _MAX_BACKWARDS
        self._lines.append(line)
        self._left = after

    def step(self) -> None:
        """Count an optimizer step."""
        num = len(self._lines)
        if not num:
            return  # a second optimizer's step after the same backwards
        if num > 1 and self._adds_up and len(set(self._lines)) == 1:
            self._nums.append(num)
        else:
            self._num_others += 1
            self._nums.clear()
        self._clear()
        if len(self._nums) == NUM_STEPS:
            self.facts = {"least": min(self._nums), "most": max(self._nums), "num_bytes": self.num_bytes}
        self.is_over = bool(self.facts) or self._num_others == _MAX_OTHERS
