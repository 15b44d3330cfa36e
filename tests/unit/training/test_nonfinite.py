# SPDX-License-Identifier: Apache-2.0
"""Gradients are looked at as they are, whatever they are, and stay so."""

from __future__ import annotations

import math

import pytest
import torch

from ddpilot.training.nonfinite import Gradients

SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
KINDS = {
    "fp32": torch.tensor([1e-45, -0.0, 3.4e38, 3.4e38]),
    "bf16": torch.tensor([1.0, 3e38], dtype=torch.bfloat16),
    "strided": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
    "empty": torch.empty(0),
    "sparse": SPARSE,
    "complex": torch.tensor([1j, 3e38]),
    "expanded": torch.ones(1).expand(4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_are_found_not_finite_and_stay_as_they_are(kind: str, bad: float) -> None:
    """Large sums and tiny numbers are finite; what is not is found beside others, and then forgotten."""
    gradient = KINDS[kind].clone() if kind != "expanded" else KINDS[kind]
    gradients = Gradients()
    spoilt = [torch.ones(2), gradient, torch.tensor([0.0, bad])]
    assert [gradients.are_finite(one) for one in ([], [gradient], spoilt, [gradient, torch.ones(2)])] == [
        True,
        True,
        False,
        True,
    ]
    before, after = (one.to_dense().reshape(-1).contiguous() for one in (KINDS[kind], gradient))
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_gradients_that_are_sparse_are_looked_into() -> None:
    """A sum of duplicates may be the first that is not finite."""
    gradients = Gradients()
    assert gradients.are_finite([SPARSE])
    assert not gradients.are_finite([SPARSE * math.inf])
