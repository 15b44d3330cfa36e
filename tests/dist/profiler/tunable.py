# SPDX-License-Identifier: Apache-2.0
"""A training script whose link takes a time for each bucket, with a parameter that is unused if its first word says so.

Annotations are not strings: DDP reads those of the communication hook.
"""

import queue
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENCY_S = 0.02
buckets: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()


def exchange() -> None:
    """Exchange buckets one after another; in a thread."""
    while True:
        buffer, done = buckets.get()
        time.sleep(LATENCY_S)
        dist.all_reduce(buffer)
        done.set_result(buffer.div_(2))


def put(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The communication hook."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buckets.put((bucket.buffer(), done))
    return done


class Net(nn.Module):
    """Four layers of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        """The layers' output."""
        y = self.layers(x)
        return y if sys.argv[1] == "unused" else y + self.unused.weight.sum() + self.unused.bias.sum()


def main() -> None:
    """Train for 30 updates on each of two ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    finds = sys.argv[1] == "unused"
    ddp = DistributedDataParallel(
        Net(),
        bucket_cap_mb=1,
        find_unused_parameters=finds,
        gradient_as_bucket_view=True,
    )
    ddp.register_comm_hook(None, put)
    threading.Thread(target=exchange, daemon=True).start()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(240, 512), torch.randint(2, (240,)))
    evaluated = DataLoader(data, batch_size=120)
    for x, y in DataLoader(data, 4, sampler=DistributedSampler(data)):
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        print(sum(len(x) for x, _ in evaluated))
    dist.destroy_process_group()


main()
