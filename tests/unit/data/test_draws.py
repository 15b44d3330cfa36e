# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch's samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.data.draws import check_weights, draw_permutation, draw_weighted

WEIGHTS = st.lists(st.just(0.0) | st.floats(0, 1.7e308), min_size=1, max_size=20).filter(any)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, num_draws=st.integers(1, 40), seed=st.integers(0, 2**64), epoch=st.integers(0, 99))
def test_draw_weighted_takes_only_samples_that_have_a_weight(
    weights: list[float], num_draws: int, seed: int, epoch: int
) -> None:
    """However small or large the weights are; without replacement each of them at most once."""
    drawable = {number for number, weight in enumerate(weights) if weight}
    array = check_weights(weights, len(weights), num_draws, True)
    drawn = draw_weighted(array, num_draws, True, seed, epoch).tolist()
    assert len(drawn) == num_draws
    assert {*drawn} <= drawable
    once = draw_weighted(array, min(num_draws, len(drawable)), False, seed, epoch).tolist()
    assert len({*once}) == len(once) == min(num_draws, len(drawable))
    assert {*once} <= drawable


def test_draw_permutation_puts_every_sample_everywhere() -> None:
    """Over many epochs each of six samples is about as often in each of six places."""
    places = np.zeros((6, 6), dtype=int)
    for epoch in range(3000):
        places[np.arange(6), draw_permutation(6, 0, epoch)] += 1
    assert abs(places - 500).max() < 100  # 4.9 standard deviations
    assert [draw_permutation(num, 0, 0).tolist() for num in (0, 1)] == [[], [0]]
