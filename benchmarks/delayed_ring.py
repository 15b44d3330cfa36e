# SPDX-License-Identifier: Apache-2.0
"""Train over a simulated link: all_reduces of a ring whose steps are delayed, and a model that sleeps to compute.

A script for `ddpilot scale`; its first argument is a case of `CASES`. Ranks that sleep share cores well, so that four
of them are a fair test on a machine of two cores.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Case:
    """A link and a model."""

    latency_s: float
    """Of a step of the ring."""
    bytes_per_s: float
    """Of each link of the ring."""
    forward_s: float
    backward_s: float
    """Of each of the layers."""
    width: int
    """Of a layer, whose gradients are one bucket."""
    spread_s: float = 0.0
    """Mean of what a forward pass may take longer, at random."""
    num_layers: int = 4


CASES = {
    "bandwidth": Case(latency_s=0.0005, bytes_per_s=10e6, forward_s=0.020, backward_s=0.008, width=128),
    "latency": Case(latency_s=0.003, bytes_per_s=1e9, forward_s=0.020, backward_s=0.010, width=64),
    "stragglers": Case(
        latency_s=0.0005, bytes_per_s=30e6, forward_s=0.025, backward_s=0.008, width=128, spread_s=0.015
    ),
}
"""Slow links, so that little is copied for the time that an exchange takes: copies would take the cores' time."""
NUM_UPDATES, BATCH_SIZE = 60, 8


class DelayedWork(Work):
    """A collective that is done when its future is."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        """Wait for the result."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future."""
        return self._future


class DelayedRing(dist.ProcessGroup):
    """A group whose all_reduces are a ring over gloo, one after another, with a sleep in each step."""

    def __init__(self, inner: Any, case: Case) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._case = inner, case
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override] # noqa: ARG002
        """Add `tensors` of all ranks."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._todo.put((tensors, future))
        return DelayedWork(future)

    def _run(self) -> None:
        number = 0
        while True:
            tensors, future = self._todo.get()
            for tensor in tensors:
                self._reduce(tensor.view(-1), number)
                number += 1
            future.set_result(tensors)

    def _reduce(self, flat: torch.Tensor, number: int) -> None:
        size, rank = self.size(), self.rank()
        if size == 1:
            return
        chunks = list(flat.tensor_split(size))
        for step in range(2 * (size - 1)):
            is_adding = step < size - 1
            sent, received = (rank - step) % size, (rank - step - 1) % size
            if not is_adding:
                sent, received = (rank + 1 - (step - size + 1)) % size, (rank - (step - size + 1)) % size
            came = torch.empty_like(chunks[received])
            works = [self._inner.send([chunks[sent].contiguous()], (rank + 1) % size, number)]
            works.append(self._inner.recv([came], (rank - 1) % size, number))
            for work in works:
                work.wait()
            num_bytes = flat.numel() * flat.element_size() / size
            time.sleep(self._case.latency_s + num_bytes / self._case.bytes_per_s)
            chunks[received].copy_(chunks[received] + came if is_adding else came)

    def broadcast(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        """As gloo does."""
        return self._inner.broadcast(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:  # type: ignore[override]
        """As gloo does."""
        return self._inner.allgather(outputs, inputs, options)

    def barrier(self, options: Any) -> Any:  # type: ignore[override]
        """As gloo does."""
        return self._inner.barrier(options)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name under which it is registered."""
        return "delayed"


class Sleep(torch.autograd.Function):
    """Sleep in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return `x`."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sleep, and pass the gradient on."""
        time.sleep(ctx.seconds)
        return grads[0], None


class Net(nn.Module):
    """Layers whose backward passes take their time."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(case.width, case.width) for _ in range(case.num_layers))
        self.case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep, and apply the layers."""
        spread_s = random.expovariate(1 / self.case.spread_s) if self.case.spread_s else 0.0
        time.sleep(self.case.forward_s + spread_s)
        for layer in self.layers:
            x = layer(Sleep.apply(x, self.case.backward_s))  # type: ignore[no-untyped-call]
        return x


def main(case: Case) -> None:
    """Train."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return DelayedRing(dist.ProcessGroupGloo(store, rank, size, timeout), case)

    dist.Backend.register_backend("delayed", create, devices=["cpu"])
    dist.init_process_group("delayed")
    torch.set_num_threads(1)
    random.seed(dist.get_rank())
    bucket_mb = case.width * (case.width + 1) * 4 / 2**20
    model = DistributedDataParallel(Net(case), bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(NUM_UPDATES * BATCH_SIZE * dist.get_world_size(), case.width))
    for (x,) in DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CASES[sys.argv[1]])
