# SPDX-License-Identifier: Apache-2.0
"""What is recorded of collectives that return before they are done has the backend's own numbers and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn import BatchNorm1d, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel

from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from tests.accelerator import on_device, why_not
from tests.soak import often

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
    pytest.mark.timeout(300),
]

LIMIT_S = 150.0


def ring_path() -> Path:
    """Where this rank records."""
    return Path(f"{os.environ['MEETING_FILE']}.{os.environ['RANK']}.ring")


def read_when_asked_again(one: torch.Tensor) -> RankLog:
    """The ring after one more collective, which asks those before it; ranks have met on the host by then."""
    torch.accelerator.synchronize()
    time.sleep(0.1)
    dist.all_reduce(one)
    return read_ring(ring_path())


def train_and_read() -> dict[str, Any]:
    """Three DDP steps, a synchronous collective before each."""
    rank, _, device = on_device.join("cpu:gloo,emu:eccl")
    group: Any = dist.group.WORLD
    with start_recording(ring_path(), rank=rank):
        model = DistributedDataParallel(
            Sequential(Linear(40, 40), BatchNorm1d(40), Linear(40, 3)).to(device), bucket_cap_mb=0.001
        )
        one = torch.ones(1, device=device)
        for _ in range(3):
            dist.all_reduce(one)
            model(torch.randn(4, 40, device=device)).sum().backward()
        log = read_when_asked_again(one)
        backends_number = group._get_backend(device)._get_sequence_number_for_group()
    dist.destroy_process_group()
    return {
        "faults": log.num_faults,
        "backend's number": backends_number,
        "numbers": [entry.seq for entry in log.collectives],
        "states": [entry.state for entry in log.collectives],
        "elements of buckets": sum(entry.num_bytes // 4 for entry in log.collectives if is_bucket(entry)),
        "lines without a place": [entry.op for entry in log.collectives if entry.line is None],
        "lines of buckets": sorted({entry.line.text for entry in log.collectives if is_bucket(entry) and entry.line}),
    }


def is_bucket(entry: Any) -> bool:
    """True for an all_reduce of DDP's gradients."""
    return entry.op == "all_reduce" and entry.ddp is not None


@often("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ddp_step_is_recorded_with_the_backends_numbers(num_ranks: int) -> None:
    """All collectives, none twice, each over in the end; the buckets hold all gradients and have the user's line."""
    found = on_device.run_to_the_end(__file__, "train_and_read", num_ranks=num_ranks, limit_s=LIMIT_S)
    for result in found:
        seen = result["train_and_read"]
        assert seen["faults"] == 0
        assert seen["numbers"] == list(range(seen["backend's number"])), seen
        assert set(seen["states"][:-1]) == {"done"}, seen
        assert seen["elements of buckets"] == 3 * (40 * 40 + 40 + 40 + 40 + 40 * 3 + 3)
        assert seen["lines without a place"] == []
        assert seen["lines of buckets"] == ["model(torch.randn(4, 40, device=device)).sum().backward()"]


def wait_for_a_late_rank() -> dict[str, Any]:
    """Rank 1 comes to two collectives when rank 0 has read what is recorded of them; then one of each other kind."""
    rank, _, device = on_device.join("cpu:gloo,emu:eccl")
    store: Any = c10d._get_default_store()
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    torch.accelerator.synchronize()
    with start_recording(ring_path(), rank=rank):
        if rank == 1:
            store.get("rank 0 has read")
        dist.all_reduce(one)
        dist.all_reduce(one, async_op=True)
        early = [entry.state for entry in read_ring(ring_path()).collectives]
        store.set("rank 0 has read", "")
        late = [entry.state for entry in read_when_asked_again(one).collectives]
        calls = [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, one.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        with c10d._coalescing_manager(device=device):
            dist.all_reduce(one)
        log = read_when_asked_again(one)
    dist.destroy_process_group()
    return {"early": early, "late": late, "in the end": [f"{each.op} {each.state}" for each in log.collectives[3:]]}


def test_synchronous_collectives_are_pending_until_the_device_is_through() -> None:
    """They give no work; batched messages and coalesced calls, which give none either, are not taken for done."""
    early, _ = on_device.run_to_the_end(__file__, "wait_for_a_late_rank", num_ranks=2, limit_s=LIMIT_S)
    assert early["wait_for_a_late_rank"] == {
        "early": ["begun", "begun"],
        "late": ["done", "done", "begun"],
        "in the end": ["send unknown", "recv unknown", "all_reduce_coalesced unknown", "all_reduce begun"],
    }
