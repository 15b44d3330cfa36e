# SPDX-License-Identifier: Apache-2.0
"""The text of a right training script, and of scripts with one fault each, for the doctor of a program."""

from __future__ import annotations

RIGHT = """\
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(10, 16)
        self.head = torch.nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)) * self.scale)


def train(epochs):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 10, generator=generator), torch.randint(3, (96,), generator=generator))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
"""


def replaced(*changes: tuple[str, str]) -> str:
    """`RIGHT` with these texts replaced; each occurs once."""
    text = RIGHT
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


FAILS_AS_ONE_PROCESS = replaced(("            loss.backward()\n", "            raise ValueError('bad sample')\n"))
MASK_ELSEWHERE = replaced(
    ('        self.register_buffer("scale", torch.ones(16))\n', '        self.mask = torch.ones(16, device="meta")\n'),
    (" * self.scale", ""),
)
NO_SAMPLER = replaced(
    ("    sampler = DistributedSampler(data)\n", ""),
    ("batch_size=8, sampler=sampler", "batch_size=8"),
    ("        sampler.set_epoch(epoch)\n", ""),
)
NOT_WRAPPED = replaced(("DistributedDataParallel(Net())", "Net()"), ("model.module.", "model."))
RANK_1_RAISES = replaced(
    (
        "            loss.backward()\n",
        (
            "            if dist.get_rank() == 1:\n"
            "                raise ValueError('bad sample')\n"
            "            loss.backward()\n"
        ),
    )
)
RANK_0_WAITS = replaced(
    (
        "            optimizer.step()\n",
        "            if dist.get_rank() == 0:\n                dist.barrier()\n            optimizer.step()\n",
    )
)
SCALED_LOSS = replaced(("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) * dist.get_world_size()"))
SLOW_LINK = replaced(
    ("import sys\n", "import sys\nimport threading\n"),
    (
        "def train(epochs):\n",
        (
            "def exchange(state, bucket):\n"
            "    buffer, future = bucket.buffer(), torch.futures.Future()\n"
            "    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)\n"
            "    work.wait()\n"
            "    threading.Timer(0.3, future.set_result, (buffer,)).start()\n"
            "    return future\n\n\n"
            "def train(epochs):\n"
        ),
    ),
    ("    sampler = ", "    model.register_comm_hook(None, exchange)\n    sampler = "),
)
"""Gradients arrive 0.3 s after they were sent."""
UNTIDY = replaced(
    ("        sampler.set_epoch(epoch)\n", ""),
    (
        "    if dist.get_rank() == 0:\n        torch.save(model.module.state_dict(), ",
        "    torch.save(model.state_dict(), ",
    ),
    ("    dist.destroy_process_group()\n", ""),
)
