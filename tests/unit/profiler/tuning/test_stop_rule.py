# SPDX-License-Identifier: Apache-2.0
"""When pairs are enough, and what they allow to say."""

from __future__ import annotations

import random

import pytest

from ddpilot.profiler.tuning.stop_rule import Verdict, decide, estimate_gain


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([2.0], "open"),
        ([2.0, 2.05], "helps"),
        ([1.2, 2.4], "open"),
        ([1.00, 1.002, 0.999, 1.001], "no gain"),
        ([1.015, 1.016, 1.015], "no gain"),
        ([0.80, 0.81, 0.80], "slower"),
        ([1.10, 0.95, 1.20, 0.99], "open"),
    ],
)
def test_decide_when_pairs_agree_or_not(ratios: list[float], verdict: Verdict) -> None:
    """Large gains need two pairs; a gain that is surely small is none; pairs that differ leave it open."""
    assert decide(ratios) == verdict


def test_estimate_gain_of_one_pair_has_no_interval() -> None:
    """Its text says nothing of one."""
    assert str(estimate_gain([1.5])) == "1.50x, 1 pair"
    assert str(estimate_gain([1.5, 1.5, 1.5])) == "1.50x (1.49 to 1.51), 3 pairs"


def test_gains_are_rarely_claimed_of_noise() -> None:
    """Of options without an effect, in runs that differ by 5 %, few help in trials and almost none again."""
    random.seed(0)

    def try_once() -> bool:
        ratios: list[float] = []
        while len(ratios) < 5 and decide(ratios) == "open":
            ratios.append(random.lognormvariate(0, 0.05))
        return decide(ratios) == "helps"

    claimed = [try_once() for _ in range(2000)]
    assert sum(claimed) / 2000 < 0.08
    again = [try_once() and try_once() for _ in range(2000)]
    assert sum(again) / 2000 < 0.01
