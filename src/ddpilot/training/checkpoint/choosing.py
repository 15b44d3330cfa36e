# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ddpilot.errors import CheckpointError

Best = tuple[str, Literal["max", "min"]]
"""A metric, and which of its values is best."""


def parse_best(best: str | None) -> Best | None:
    """The metric of "max acc" or "min loss", and which of the two it is. Raises CheckpointError for another text."""
    if best is None:
        return None
    way, _, name = best.strip().partition(" ")
    if way not in ("max", "min") or not name.strip():
        raise CheckpointError(
            "choosing the best checkpoint", found=f"`best` is {best!r}", fix='Say "max acc" or "min acc".'
        )
    return (name.strip(), "max") if way == "max" else (name.strip(), "min")


def better(best: Best, metrics: Mapping[str, float], so_far: Mapping[str, float]) -> bool:
    """Is `metrics` better than `so_far`? NaN and a metric that is missing never are; a tie is not."""
    name, direction = best
    value, other = metrics.get(name, math.nan), so_far.get(name, math.nan)
    if math.isnan(value):
        return False
    if math.isnan(other):
        return True
    return value > other if direction == "max" else value < other
