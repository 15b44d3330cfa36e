# SPDX-License-Identifier: Apache-2.0
"""Looks at samples: equal ones give equal numbers, whatever they are made of."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ddpilot.data.batches import digest_sample


@dataclass
class Pair:
    """A sample of a class of one's own."""

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
def test_glimpse_is_equal_for_equal_samples_alone(one: Any, other: Any, text: str) -> None:
    """By their content, not by where they are in memory."""
    again = one if type(one) is object else copy.deepcopy(one)
    assert digest_sample(one) == digest_sample(again)
    assert digest_sample(one).number != digest_sample(other).number
    assert digest_sample(one).text == text


def test_glimpse_keeps_its_text_short() -> None:
    """A long sample is still told by what comes late in it."""
    assert len(digest_sample("x" * 500).text) == 60
    assert digest_sample(["x"] * 40 + ["y"]).number != digest_sample(["x"] * 41).number
