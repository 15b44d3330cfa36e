# SPDX-License-Identifier: Apache-2.0
"""Compares checkpoints by a metric to choose the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ddpilot.errors import CheckpointError

Best = tuple[str, Literal["max", "min"]]
"""A metric's name, and whether its largest or smallest value is best."""


def parse_best(best: str | None) -> Best | None:
    """Parse "max acc" or "min loss" into metric and direction. Raises CheckpointError for other texts."""
    if best is None:
        return None
    way, _, name = best.strip().partition(" ")
    if way not in ("max", "min") or not name.strip():
        raise CheckpointError(
            "choosing the best checkpoint", found=f"`best` is {best!r}", fix='Say "max acc" or "min acc".'
        )
    return (name.strip(), "max") if way == "max" else (name.strip(), "min")


def better(best: Best, metrics: Mapping[str, float], so_far: Mapping[str, float]) -> bool:
    """True if `metrics` is better than `so_far`. False for NaN, a missing metric and a tie."""
    name, direction = best
    value, other = metrics.get(name, math.nan), so_far.get(name, math.nan)
    if math.isnan(value):
        return False
    if math.isnan(other):
        return True
    return value > other if direction == "max" else value < other
