# SPDX-License-Identifier: Apache-2.0
"""Rows of a log: what a run measured as plain numbers, by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import torch

from ddpilot.errors import LoopError
from ddpilot.trainer.history import flatten
from ddpilot.trainer.run import Run


def update_row(run: Run) -> dict[str, Any]:
    """The row of the current update: "batch_loss", this rank's mean of the batch, and what callbacks measured.

    Waits for the device where that still computes.
    """
    row = {"epoch": run.epoch, "update": run.update, "batch_loss": run.loss, **run.values}
    return {name: plain(value) for name, value in row.items() if value is not None}


def epoch_row(run: Run) -> dict[str, Any]:
    """The row of the current epoch, those of nested dicts under "name.key"."""
    return {name: plain(value) for name, value in flatten(run.metrics).items()}


def plain(value: Any) -> Any:
    """A tensor of one element as a number, other tensors and arrays as lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of `row` can be drawn as a curve."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def check_every(name: str, every: int) -> int:
    """`every`, a number of updates. LoopError below 1."""
    if every < 1:
        raise LoopError(f"making a {name}", found=f"`every` is {every}", fix="Give a number of updates, 1 or more.")
    return every


class Watched:
    """A metric of the epochs' rows and the best value that it had.

    `mode`: "min" where less is better, "max" where more is. `min_delta`: what is better by no more than this is not.
    A value that is NaN is never better. Raises LoopError for another mode and a negative `min_delta`.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        did = f"watching {monitor!r}"
        if mode not in ("min", "max"):
            raise LoopError(did, found=f"`mode` is {mode!r}", fix="Use 'min' (as for a loss) or 'max'.")
        if not min_delta >= 0:
            raise LoopError(did, found=f"`min_delta` is {min_delta}", fix="Use 0 or more.")
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None
        """None before the first value that is a number."""

    def look(self, run: Run) -> float | None:
        """The value of the epoch that has ended; None where there was no validation: see `Run.skips_validation`.

        Nor is there one where an epoch was left in the middle. Raises LoopError where another has no such metric.
        """
        row = epoch_row(run)
        if isinstance(value := row.get(self.monitor), int | float):
            return float(value)
        if run.loop.next_batch or (run.skips_validation and self.monitor.startswith("val_")):
            return None
        close = difflib.get_close_matches(self.monitor, numbers(row), 1)
        near = f"Did you mean {close[0]!r}? " if close else ""
        raise LoopError(
            f"watching {self.monitor!r} in epoch {run.epoch}",
            found=f"its row has {', '.join(map(repr, numbers(row)))}",
            fix=f"{near}Choose one of those; names that begin with 'val_' need a validation set.",
            rank=run.loop.rank,
        )

    def improve(self, value: float) -> bool:
        """Is `value` better than the best so far? Then it is the best now."""
        if math.isnan(value) or (self.best is not None and self._sign * (value - self.best) <= self._min_delta):
            return False
        self.best = value
        return True
