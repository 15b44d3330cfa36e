# SPDX-License-Identifier: Apache-2.0
"""Count how often the host waits for the device in training."""

from __future__ import annotations

import os
from typing import Any

from ddpilot import Launcher
from tests.preload import PRELOAD

NUM_STEPS = 16


def count_with(loop: str, num_rounds: int, options: dict[str, Any]) -> list[list[dict[str, int]]]:
    """By rank: the host's waits in each of `num_rounds` times 16 steps of `loop`, the name of a function here."""
    launcher = Launcher(nproc_per_node=2, output="silent", timeout_s=120, preload=PRELOAD, **options)
    return [list(found) for found in launcher.run(globals()[loop], num_rounds)]


def plain_ddp(num_rounds: int) -> list[dict[str, int]]:
    """A loop of the user's own that asks the device for nothing."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device: Any = torch.get_device_module("emu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,emu:eccl")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to("emu")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 16, device="emu"), torch.randn(8, 4, device="emu")
    found = []
    for _ in range(num_rounds):
        torch.accelerator.synchronize()
        device.reset_host_syncs()
        for _ in range(NUM_STEPS):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        found.append(device.host_syncs())
    dist.destroy_process_group()
    return found
