# SPDX-License-Identifier: Apache-2.0
"""Metrics that are functions."""

from __future__ import annotations

import pytest
import torch

from ddpilot.group.protocol import FakeGroup
from ddpilot.training.evaluation.metrics import make_meters


@pytest.mark.parametrize("kind", [int, torch.tensor, lambda count: torch.tensor(float(count))])
def test_mean_of_counts_is_in_float64_whatever_the_counts_are(kind: type) -> None:
    """A count in a tensor, as that of tokens is, must not make the sum one of 32 bits."""
    means, counts = torch.tensor([1 / 3, 2 / 7], dtype=torch.float64), (11, 5)
    meter = make_meters({"tokens": lambda mean, count: (mean, kind(count))}, torch.device("cpu"))["tokens",]
    for mean, count in zip(means, counts, strict=True):
        meter.update((mean, count), 1)
    assert meter.compute(FakeGroup()) == pytest.approx((11 / 3 + 10 / 7) / 16, rel=1e-15)
