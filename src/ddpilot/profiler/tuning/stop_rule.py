# SPDX-License-Identifier: Apache-2.0
"""When enough pairs of runs are made: the interval of the gain, and the verdict. Does not import torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEAST_GAIN = 0.03
"""Gains below this are not looked for."""
MIN_PAIRS = 2
MIN_FINAL_PAIRS = 3
"""For the gain that is printed in the end, whose interval is far narrower than that of two."""
_MIN_NOISE = 0.002
"""Relative standard deviation of a pair that is assumed at least: two pairs may be alike by chance."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Factors of Student's distribution for an interval of 95 %, by degrees of freedom from 1 on."""
_NORMAL = 2.0
"""For more degrees of freedom: larger than those."""

Verdict = Literal["helps", "no gain", "slower", "open"]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast an option is: the mean of pairs, and the interval in which the true gain is by 95 %."""

    factor: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        pairs = f"{self.num_pairs} pair{'s' * (self.num_pairs > 1)}"
        if math.isinf(self.high):
            return f"{self.factor:.2f}x, {pairs}"
        return f"{self.factor:.2f}x ({self.low:.2f} to {self.high:.2f}), {pairs}"


def estimate_gain(ratios: Sequence[float]) -> Gain:
    """Return the gain of one or more pairs. `ratios`: duration without the option, divided by that with it."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, freedom = statistics.fmean(logs), len(logs) - 1
    if not freedom:
        return Gain(factor=math.exp(mean), low=0.0, high=math.inf, num_pairs=1)
    noise = max(statistics.stdev(logs), _MIN_NOISE) / math.sqrt(len(logs))
    half = noise * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL)
    low, high = (math.exp(max(min(mean + sign * half, 50.0), -50.0)) for sign in (-1, 1))
    return Gain(factor=math.exp(mean), low=low, high=high, num_pairs=len(logs))


def decide(ratios: Sequence[float], min_pairs: int = MIN_PAIRS) -> Verdict:
    """Return the verdict from the pairs; "open" if more of them are needed, as they are below `min_pairs`."""
    if len(ratios) < min_pairs:
        return "open"
    gain = estimate_gain(ratios)
    if gain.low > 1.0 and gain.factor >= 1.0 + LEAST_GAIN:
        return "helps"
    if gain.high < 1.0:
        return "slower"
    return "no gain" if gain.high < 1.0 + LEAST_GAIN else "open"
