# SPDX-License-Identifier: Apache-2.0
"""`Monitor`: a metric and its direction, for the best checkpoint, best weights and early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from ddpilot.errors import CheckpointError, LoopError


@dataclass(frozen=True)
class Monitor:
    """A metric to compare by. Raises LoopError for other modes than "min" and "max" and for a negative `min_delta`."""

    name: str
    """The metric's name."""
    mode: Literal["min", "max"]
    """"max" if a larger value is better, "min" if a smaller one is."""
    min_delta: float = 0.0
    """Improvements of at most this much do not count."""

    def __post_init__(self) -> None:
        did = f"monitoring {self.name!r}"
        if self.mode not in ("min", "max"):
            raise LoopError(did, found=f"`mode` is {self.mode!r}", fix="Use 'min' (as for a loss) or 'max'.")
        if not self.min_delta >= 0:
            raise LoopError(did, found=f"`min_delta` is {self.min_delta}", fix="Use 0 or more.")

    @classmethod
    def parse(cls, text: str) -> Monitor:
        """Parse "max accuracy" or "min loss". Raises CheckpointError for other texts."""
        mode, _, name = text.strip().partition(" ")
        if mode not in ("min", "max") or not name.strip():
            found = f"`best` is {text!r}"
            raise CheckpointError("choosing the best checkpoint", found=found, fix='Use "max acc" or "min loss".')
        return cls(name.strip(), cast(Literal["min", "max"], mode))

    def is_better(self, value: float, best: float | None) -> bool:
        """True if `value` is better than `best`, which is None or NaN if there is none yet. False for NaN and a tie."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return (value - best if self.mode == "max" else best - value) > self.min_delta

    def reaches(self, value: float, goal: float) -> bool:
        """True if `value` is `goal` or better. False for NaN."""
        return value >= goal if self.mode == "max" else value <= goal

    def __str__(self) -> str:
        return f"{self.mode} {self.name}"
