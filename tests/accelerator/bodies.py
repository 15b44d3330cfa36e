# SPDX-License-Identifier: Apache-2.0
"""What ranks run in tests of the emulated accelerator: functions that they import."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def train() -> dict[str, Any]:
    """Train a DDP model for three steps; what was made, and where."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ddpilot

    with ddpilot.init_group() as group:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1, dtype=torch.float64).to(group.device)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            rows = torch.full((2, 4), group.rank + number + 1.0, dtype=torch.float64).to(group.device)
            model(rows).square().mean().backward()
            optimizer.step()
        group.barrier()
        weights = [float(each) for each in net.weight.detach().cpu().flatten()]
        return {"device": str(group.device), "backend": group.backend, "weights": weights}


def free_while_waiting(done: Path) -> list[str]:
    """Rank 0 waits in `item()` for an all_reduce that rank 1 does not make, and is freed; what happened there."""
    import threading
    import time

    import torch
    import torch.distributed as dist

    import ddpilot
    from ddpilot.group.teardown import free_group, take_down

    group = ddpilot.init_group()
    weight = torch.ones(1, device=group.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    said: list[str] = []
    if group.rank == 1:
        while not done.exists():
            time.sleep(0.01)
        take_down(healthy=False)
        return said
    freed: list[Any] = []

    def free() -> None:
        time.sleep(1.0)
        freed.append(free_group())

    thread = threading.Thread(target=free)
    thread.start()
    weight.grad = torch.ones(1, device=group.device)
    dist.all_reduce(weight.grad)
    try:
        weight.grad.item()
        said.append("item returned")
    except RuntimeError as error:
        said.append(f"item raised {type(error).__name__}")
    thread.join()
    said.append(f"aborted {freed[0].aborted}, stuck {freed[0].still_stuck}")
    uses: list[Any] = [optimizer.step, lambda: dist.all_reduce(torch.ones(1, device=group.device))]
    for what in uses:
        try:
            what()
            said.append("went on")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    take_down(healthy=False)
    optimizer.step()
    done.touch()
    return said
