# SPDX-License-Identifier: Apache-2.0
"""Numbers that a function returns, or a script prints, are found and compared."""

from __future__ import annotations

import pytest

from ddpilot.diagnose.verify.verify import _is_close, _numbers_in, compare_lines


def test_numbers_are_named_by_where_they_are() -> None:
    """Floats in nested containers; counts, text and tensors are left out."""
    value = {"loss": 0.5, "epochs": [{"acc": 0.1}, (1, 2.0)], "name": "x"}
    assert list(_numbers_in(value)) == [("['loss']", 0.5), ("['epochs'][0]['acc']", 0.1), ("['epochs'][1][1]", 2.0)]
    assert list(_numbers_in(3.0)) == [("", 3.0)]
    assert list(_numbers_in(None)) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.00001, True),
        (1.0, 1.001, False),
        (0.0, 1e-7, True),
        (float("nan"), float("nan"), True),
        (float("inf"), 1.0, False),
        (float("inf"), float("inf"), True),
    ],
)
def test_close_numbers_differ_by_less_than_the_limit(one: float, other: float, expected: bool) -> None:
    """Relative to the larger; what is not finite must be the same."""
    assert _is_close(one, other, 1e-4) is expected


@pytest.mark.parametrize(
    ("one", "other", "num"),
    [
        (("loss 0.512",), ("loss 0.700",), 1),
        (("loss 0.512",), ("loss 0.513",), 0),  # in the last place that is printed
        (("took 3 s",), ("took 4 s",), 0),  # no decimal point: a count
        (("a 1.5 b 2.5",), ("a 1.5",), 0),  # other lines
        (("epoch 1.0: 2.50",), ("epoch 1.0: 3.50", "more"), 1),
    ],
)
def test_lines_are_compared_where_only_numbers_differ(one: tuple[str, ...], other: tuple[str, ...], num: int) -> None:
    """Each pair of lines once."""
    assert len(list(compare_lines(one, other, one, 1e-4, []))) == num


@pytest.mark.parametrize(
    "line", ["'train_runtime': '{}', 'epoch'", "epoch took {} s", "{} it/s", "elapsed: {}", "peak memory {}", "{} MB"]
)
def test_times_and_sizes_are_not_compared(line: str) -> None:
    """They depend on the machine."""
    one, other = (line.format(1.5),), (line.format(0.25),)
    assert list(compare_lines(one, other, one, 1e-4, [])) == []


def test_numbers_that_change_in_a_second_run_and_own_losses_are_not_compared() -> None:
    """Rank 0 prints the loss of its own samples in most programs."""
    one, other = ("x 1.5000 acc 0.5000",), ("x 2.5000 acc 0.7500",)
    assert len(list(compare_lines(one, other, one, 1e-4, [2.5]))) == 1
    assert list(compare_lines(one, other, ("x 1.5000 acc 0.6000",), 1e-4, [2.50004])) == []
