# SPDX-License-Identifier: Apache-2.0
"""Whether numbers are finite is told from their bits as an operator tells it."""

from __future__ import annotations

import math

import pytest
import torch

from ddpilot.guard.probes.data.finite import MAX_ELEMENTS, is_finite

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_is_finite_finds_one_element_that_is_not_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """The first, a middle and the last one, and one of a number alone."""
    for num, place in ((1, 0), (7, 0), (7, 3), (7, 6), (MAX_ELEMENTS + 1, MAX_ELEMENTS)):
        tensor = torch.zeros(num, dtype=dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor)
    assert not is_finite(torch.tensor(value, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_finite_takes_the_largest_and_the_smallest_numbers_for_finite(dtype: torch.dtype) -> None:
    """Also where their sum is not: of either sign, denormal, zero, none at all."""
    info = torch.finfo(dtype)
    numbers = [info.max, info.max, info.min, info.min, info.tiny, info.smallest_normal / 4, 0.0, -0.0]
    assert is_finite(torch.tensor(numbers, dtype=dtype))
    assert is_finite(torch.full((MAX_ELEMENTS,), info.max, dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))


def test_is_finite_looks_at_what_is_shown_only() -> None:
    """Of a view the elements that it shows count, in whatever order they lie."""
    tensor = torch.zeros(4, 4)
    tensor[:, 1] = math.inf
    assert is_finite(tensor[:, 2])
    assert is_finite(tensor[0, 2:])
    assert not is_finite(tensor[:, 1])
    assert not is_finite(tensor.t())
