# SPDX-License-Identifier: Apache-2.0
"""How often memory is sampled, and what a sample has."""

from __future__ import annotations

import psutil
import pytest

from ddpilot.profiler.rank.resources import MemorySamples


def test_memory_is_sampled_at_most_every_20_ms() -> None:
    """What was taken is not kept; resident memory is that of psutil."""
    samples = MemorySamples()
    for at_ms in (1, 10, 20, 22, 50, 55):
        samples.sample(at_ms * 1_000_000)
    taken = samples.take()
    assert [time_ns // 1_000_000 for time_ns, *_ in taken] == [1, 22, 50]
    assert taken[-1][1] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert samples.take() == []
