# SPDX-License-Identifier: Apache-2.0
"""What is recorded of collectives that return at once, and are started by the threads of the backward engine."""

from __future__ import annotations

import os
import time
from typing import Any

from ddpilot import Launcher
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import RING_DIR_VARIABLE, ring_path
from tests.preload import PRELOAD


def on_ranks(function: str, num_ranks: int) -> list[Any]:
    """What `function`, named here, returns on each rank."""
    launcher = Launcher(nproc_per_node=num_ranks, output="silent", timeout_s=120, preload=PRELOAD)
    return list(launcher.run(globals()[function]))


def _begin() -> None:
    import torch
    import torch.distributed as dist

    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,emu:eccl")


def _log() -> RankLog:
    return read_ring(ring_path(os.environ[RING_DIR_VARIABLE], int(os.environ["RANK"])))


def ddp_steps() -> dict[str, Any]:
    """Four steps of a model with two buckets: faults, and number, operation, part and source line of each record."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _begin()
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)).to("emu")
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    for _ in range(4):
        loss = model(torch.randn(8, 16, device="emu")).square().mean()
        loss.backward()
        model.zero_grad()
    dist.all_reduce(torch.ones(1, device="emu"))
    log = _log()
    dist.destroy_process_group()
    entries = [
        (each.seq, each.op, each.ddp.what if each.ddp else "", each.ddp.index if each.ddp else None, each.line.text)
        for each in log.collectives
        if each.line is not None
    ]
    return {"num_faults": log.num_faults, "num_begun": log.num_begun, "entries": entries}


def many_in_flight() -> list[list[str]]:
    """States of eight large all_reduces and a barrier, while rank 1 has not come, and when all of them are over."""
    import torch
    import torch.distributed as dist

    _begin()
    dist.barrier()
    x = torch.ones(8 << 20, device="emu")
    if dist.get_rank() == 1:
        time.sleep(3)
    for _ in range(8):
        dist.all_reduce(x, async_op=True)
    meanwhile = [str(each.state) for each in _log().collectives if each.num_bytes > 8 << 20]
    torch.accelerator.synchronize()
    dist.all_reduce(x, async_op=True)
    afterwards = [str(each.state) for each in _log().collectives if each.num_bytes > 8 << 20]
    torch.accelerator.synchronize()
    dist.destroy_process_group()
    return [meanwhile, afterwards]
