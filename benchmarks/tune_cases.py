# SPDX-License-Identifier: Apache-2.0
"""Train with one thing that an option of DDP or of the loader changes; its first word names the case.

The link between the ranks is simulated where it matters: a communication hook that hands buckets to a thread, which
takes a time for each and exchanges them in turn. Annotations are not strings: DDP reads those of the hook.
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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CASE = sys.argv[1]
BATCH_SIZE, NUM_UPDATES, WIDTH = 4, 60, 512
LOADING_S, FORWARD_S = 0.08, 0.020
LATENCY_S = 0.06
"""Of a bucket on the link of "buckets"."""
BYTES_PER_S = {"overlap": 200e6, "bandwidth": 100e6, "find_unused": 80e6}
"""Of the link."""
BACKWARD_S = {"overlap": 0.006, "find_unused": 0.01}
"""Of a layer."""


class Samples(Dataset[Any]):
    """Random samples, of which the first of each batch takes a time for "loader"."""

    num_read = 0

    def __len__(self) -> int:
        return 2 * BATCH_SIZE * NUM_UPDATES

    def __getitem__(self, index: int) -> Any:
        if self.num_read % BATCH_SIZE == 0 and CASE == "loader":
            time.sleep(LOADING_S)
        self.num_read += 1
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 2


class Net(nn.Module):
    """Layers of 1 MB; for "find_unused" they are used in the opposite order of their definition."""

    def __init__(self) -> None:
        super().__init__()
        num = {"buckets": 12, "overlap": 24, "find_unused": 8, "bandwidth": 12}.get(CASE, 1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last layer."""
        if CASE in ("loader", "computation"):
            time.sleep(FORWARD_S)
        for layer in reversed(list(self.layers)) if CASE == "find_unused" else self.layers:
            x = torch.tanh(layer(x))
            if CASE in BACKWARD_S:
                x.register_hook(_take_time)  # type: ignore[no-untyped-call]
        return x


def _take_time(_: torch.Tensor) -> None:
    time.sleep(BACKWARD_S[CASE])


class Link:
    """Exchanges buckets one after another in a thread. `latency_s`: of a bucket; `bytes_per_s`: of its content."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._buckets: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._exchange, daemon=True).start()

    def take(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The communication hook."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._buckets.put((bucket.buffer(), done))
        return done

    def _exchange(self) -> None:
        while True:
            buffer, done = self._buckets.get()
            time.sleep(self._latency_s + buffer.numel() * buffer.element_size() / self._bytes_per_s)
            dist.all_reduce(buffer)
            done.set_result(buffer.div_(dist.get_world_size()))


def main() -> None:
    """Train on two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if CASE == "buckets":
        model = DistributedDataParallel(Net(), bucket_cap_mb=2, gradient_as_bucket_view=True)
        model.register_comm_hook(None, Link(LATENCY_S, 1e12).take)
    elif CASE == "find_unused":
        model = DistributedDataParallel(
            Net(), bucket_cap_mb=1, find_unused_parameters=True, gradient_as_bucket_view=True
        )
        model.register_comm_hook(None, Link(0.0, BYTES_PER_S[CASE]).take)
    elif CASE in BYTES_PER_S:
        model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
        model.register_comm_hook(None, Link(0.0, BYTES_PER_S[CASE]).take)
    else:
        model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Samples()
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
