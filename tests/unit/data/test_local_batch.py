# SPDX-License-Identifier: Apache-2.0
"""Digests of samples: equal samples of any structure have equal digests."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ddpilot.data.local_batch import digest_sample, mix_seed, random_kept, seed_random


@dataclass
class Pair:
    """A user-defined sample."""

    image: Any
    label: int


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (3, 4, "3"),
        ("a text", "another", "'a text'"),
        (np.float32(0.5), np.float32(0.25), "0.5"),
        (torch.tensor(2.0), torch.tensor(3.0), "2.0"),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2), "[0, 1, 2, ...]"),
        ((torch.ones(5000), 1), (torch.ones(5000), 2), "[1, 1, 1, ...], 1"),
        ({"x": np.zeros((2, 2)), "name": b"n"}, {"y": np.zeros((2, 2)), "name": b"n"}, "'x', [0, 0, 0, ...], 'name'"),
        (Pair(torch.zeros(2), 0), Pair(torch.zeros(2), 1), "[0, 0], 0"),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), "[1, 1]"),
        (torch.ones(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64), "(1+0j)"),
        (torch.tensor([True]), torch.tensor([False]), "True"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float8_e4m3fn), "[1, 1]"),
        (object(), [], "a object"),
        (torch.ones(0), torch.ones(0, 2), "[]"),
        (torch.eye(2).to_sparse(), None, "a Tensor"),
    ],
)
def test_digest_sample_is_equal_for_equal_samples_only(one: Any, other: Any, text: str) -> None:
    """It depends on the content, not on the address in memory."""
    again = one if type(one) is object else copy.deepcopy(one)
    assert digest_sample(one) == digest_sample(again)
    assert digest_sample(one).number != digest_sample(other).number
    assert digest_sample(one).text == text


def test_digest_sample_shortens_its_text() -> None:
    """The number still depends on the end of a long sample."""
    assert len(digest_sample("x" * 500).text) == 60
    assert digest_sample(["x"] * 40 + ["y"]).number != digest_sample(["x"] * 41).number


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
