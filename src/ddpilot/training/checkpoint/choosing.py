# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ddpilot.errors import CheckpointError

Best = tuple[str, Literal["max", "min"]]


def checked_best(best: Best | None) -> Best | None:
    """`best` as it is. Raises CheckpointError where it is no metric with "max" or "min"."""
    if best is not None and (best[1] not in ("max", "min")):
        raise CheckpointError("choosing the best checkpoint", found=f"`best` is {best!r}", fix='Say ("acc", "max").')
    return best


def better(best: Best, metrics: Mapping[str, float], so_far: Mapping[str, float]) -> bool:
    """Is `metrics` better than `so_far`? NaN and a metric that is missing never are; a tie is not."""
    name, direction = best
    value, other = metrics.get(name, math.nan), so_far.get(name, math.nan)
    if math.isnan(value):
        return False
    if math.isnan(other):
        return True
    return value > other if direction == "max" else value < other
