# SPDX-License-Identifier: Apache-2.0
"""A metric and its direction."""

from __future__ import annotations

import math

import pytest

from ddpilot.checkpoint.manifest import Monitor
from ddpilot.errors import CheckpointError, LoopError


def test_parse_reads_direction_and_name() -> None:
    """Spaces around them do not count; a text without a direction is refused."""
    assert Monitor.parse(" max  val acc ") == Monitor("val acc", "max")
    assert str(Monitor.parse("min loss")) == "min loss"
    for text in ("acc", "max", "largest acc", ""):
        with pytest.raises(CheckpointError, match='Use "max acc" or "min loss"'):
            Monitor.parse(text)


@pytest.mark.parametrize(
    ("monitor", "value", "best", "is_better"),
    [
        (Monitor("acc", "max"), 2.0, 1.0, True),
        (Monitor("acc", "max"), 1.0, 1.0, False),
        (Monitor("acc", "min"), 2.0, 1.0, False),
        (Monitor("acc", "min"), 0.5, None, True),
        (Monitor("acc", "min"), 0.5, math.nan, True),
        (Monitor("acc", "max"), math.nan, None, False),
        (Monitor("acc", "max", min_delta=0.5), 1.5, 1.0, False),
        (Monitor("acc", "max", min_delta=0.5), 1.6, 1.0, True),
    ],
)
def test_is_better_by_more_than_min_delta(monitor: Monitor, value: float, best: float | None, is_better: bool) -> None:
    """NaN is never better, and everything else is better than NaN or nothing."""
    assert monitor.is_better(value, best) is is_better


def test_other_modes_and_negative_margins_are_refused() -> None:
    """The error names the metric and the value."""
    with pytest.raises(LoopError, match="monitoring 'acc': `mode` is 'up'"):
        Monitor("acc", "up")  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="`min_delta` is -1"):
        Monitor("acc", "max", min_delta=-1)
