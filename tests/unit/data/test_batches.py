# SPDX-License-Identifier: Apache-2.0
"""Digests of samples: equal samples of any structure have equal digests."""

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
