# SPDX-License-Identifier: Apache-2.0
"""What the watch can and cannot prove of collectives that return at once: each sentence of docs/how_to/hang.md on it.

Shown elsewhere: mismatches, ranks that have ended or died, other groups, roots and receivers that compute, ranks that
do not come and what cannot be proven (`test_zoo.py`), what batched messages leave open (`test_recording.py`), that
recording makes no host synchronization (`test_host_syncs.py`) and names no parameters in the second backward
(`test_record.py`). That a rank which has left its groups is named: by the unit tests of `watch/analysis.py`, since the
emulated backend ends the other rank at once then.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.reader import read_ring
from tests.accelerator import on_device, why_not
from tests.accelerator.test_recording import ring_path

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def begin_late() -> dict[str, Any]:
    """A collective, a pause, another one: state and end of the first before and after the second."""
    rank, _, device = on_device.join("cpu:gloo,emu:eccl")
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    torch.accelerator.synchronize()
    with start_recording(ring_path(), rank=rank):
        dist.all_reduce(one)
        torch.accelerator.synchronize()
        time.sleep(1.0)
        before = read_ring(ring_path()).collectives[0]
        dist.all_reduce(one)
        torch.accelerator.synchronize()
        after, second = read_ring(ring_path()).collectives
    dist.destroy_process_group()
    assert after.end_ns is not None
    return {
        "before": str(before.state),
        "after": str(after.state),
        "lasted_s": (after.end_ns - after.start_ns) / 1e9,
        "ended_with_the_next": abs(after.end_ns - second.start_ns) < 50_000_000,
    }


@pytest.mark.timeout(200)
def test_a_collective_ends_for_the_watch_when_its_thread_starts_the_next() -> None:
    """It was over a second before: only threads that start collectives ask, so its time is that of the next one."""
    for found in on_device.run_to_the_end(__file__, "begin_late", num_ranks=2, limit_s=150.0):
        seen = found["begin_late"]
        assert (seen["before"], seen["after"]) == ("begun", "done")
        assert seen["lasted_s"] > 1.0
        assert seen["ended_with_the_next"]
