# SPDX-License-Identifier: Apache-2.0
"""Random state for one sample."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ddpilot.data.sample_seeds import mix_seed, random_kept, seed_random


def draw() -> tuple[float, float, float]:
    """One number of each source."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_mix_seed_gives_unrelated_numbers_of_64_bits() -> None:
    """No two of many neighbouring keys collide, and each bit is set in about half of them."""
    seeds = {mix_seed(seed, epoch, sample) for seed in range(10) for epoch in range(10) for sample in range(100)}
    assert len(seeds) == 10_000
    assert all(4700 < sum(seed >> bit & 1 for seed in seeds) < 5300 for bit in range(64))
    assert mix_seed(1, 2) != mix_seed(2, 1) != mix_seed(2, 1, 0)
    assert mix_seed(-1) == mix_seed(2**64 - 1)


def test_seed_random_decides_what_all_three_draw() -> None:
    """Equal seeds give equal numbers, and different seeds different ones in each generator."""
    drawn = []
    for seed in (5, 5, 6):
        seed_random(mix_seed(seed))
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_random_kept_gives_the_state_back_when_the_block_raises() -> None:
    """The model's draws do not depend on the samples read in between."""
    seed_random(1)
    expected = draw()
    seed_random(1)

    def read() -> None:
        with random_kept():
            seed_random(2)
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert draw() == expected
