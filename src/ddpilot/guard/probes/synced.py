# SPDX-License-Identifier: Apache-2.0
"""Whether the backwards whose gradients add up to one step are all reduced, where one reduction would do."""

from __future__ import annotations

from typing import Any

from torch import Tensor

NUM_STEPS = 8
"""So many steps in a row have to be accumulated so, before it is noted."""

_MAX_OTHERS = 3
_MAX_BACKWARDS = 1024


class SyncedBackwards:
    """Follows the first steps of one DDP model; over after 3 that do not accumulate, which most programs have.

    Only what a loop runs at one line counts: two lines are two losses, each with a reason of its own. Gradients that
    are cleared, read and put together in between do not add up.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.num_bytes = sum(one.numel() * one.element_size() for one in parameters)
        self.is_over = False
        self._num_others = 0
        self._clear()
        self._nums: list[int] = []
        self.facts: dict[str, Any] = {}
        """What is to be noted, once it is known."""

    @property
    def is_nearly_known(self) -> bool:
        """Whether the step to which the next backward leads may be the last one that has to be seen."""
        return len(self._nums) == NUM_STEPS - 1 and not self._lines

    def _clear(self) -> None:
        self._lines: list[tuple[str, int]] = []
        self._adds_up = True
        self._left: Any = None

    def backward(self, line: tuple[str, int], before: Any, after: Any, *, is_reduced: bool) -> None:
        """A backward at `line` found these gradients, as `DdpModel.gradient_state` gives them, and left those."""
        if self._lines:
            self._adds_up &= before == self._left
        self._adds_up &= is_reduced and len(self._lines) < _MAX_BACKWARDS
        self._lines.append(line)
        self._left = after

    def step(self) -> None:
        """An optimizer took what there was."""
        num = len(self._lines)
        if not num:
            return  # of another optimizer, which has the same backwards
        if num > 1 and self._adds_up and len(set(self._lines)) == 1:
            self._nums.append(num)
        else:
            self._num_others += 1
            self._nums.clear()
        self._clear()
        if len(self._nums) == NUM_STEPS:
            self.facts = {"least": min(self._nums), "most": max(self._nums), "num_bytes": self.num_bytes}
        self.is_over = bool(self.facts) or self._num_others == _MAX_OTHERS
