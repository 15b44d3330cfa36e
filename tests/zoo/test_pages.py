# SPDX-License-Identifier: Apache-2.0
"""The wrong code of a finding's page is found with ranks of gloo on the CPU, and the right code runs to its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import pytest

from ddpilot.findings.catalog import find_entry
from ddpilot.findings.page import blocks_of
from tests.soak import often
from tests.zoo.watched import run_watched

GIVEN = """
import contextlib, os, random, time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

rank, world_size, local_rank = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
device, num_epochs = torch.device("cpu"), 3
torch.manual_seed(0)
dataset = val_dataset = TensorDataset(torch.randn(13, 8), torch.randn(13, 1))
torch.manual_seed(rank)
tensor, x, y = torch.randn(4), torch.randn(8, 8), torch.randn(8, 1)
loss_fn = F.mse_loss
"""
"""What the blocks take for granted, on the CPU. The code of a case defines `model` and `optimizer`."""
GROUP = 'dist.init_process_group("gloo")\n'
DDP_MODEL = "model = DDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))\n"
MODEL = "model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOADER = "loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))\n"


END = "if dist.is_initialized():\n    dist.destroy_process_group()\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What stands around the blocks of a page."""

    before: str = DDP_MODEL + SGD
    after: str = ""
    num_steps: int = 1
    """How often the block runs."""
    num_ranks: int = 2
    makes_group: bool = False
    """True if the block calls `init_process_group` itself."""


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.backbone(x).relu())
model = Net()
"""
STATE = """
path = f"{__file__}.pt"
if rank == 0:
    torch.save({name: value + 1 for name, value in model.state_dict().items()}, path)
dist.barrier()
"""
LARGE = "dataset = TensorDataset(torch.arange(1024.0).reshape(128, 8) / 1024, torch.ones(128, 1))\n"
ALONE = "data = [(torch.randn(8, 8), y) for _ in range(60)]\ntorch.manual_seed(0)\nmain(data, device)\n"
EPOCHS = "batches = [torch.randn(8, 8) for _ in range(60)]\n"
CASES = {
    "DDP201": Case(before=DDP_MODEL + SGD + "y = y + 10 * (rank == 0)\n"),
    "DDP202": Case(before="y = (torch.arange(8) > rank).long()\n"),
    "DDP203": Case(before="batches = [x, y] if rank == 0 else []\n"),
    "DDP204": Case(),
    "DDP205": Case(after="share(tensor)\n"),
    "DDP206": Case(),
    "DDP207": Case(),
    "DDP208": Case(before=MODEL + SGD, after="train(model, [x] * 20, optimizer, time.monotonic(){more})\n"),
    "DDP210": Case(before=MODEL + SGD, after="train(model, [x, x * float('nan') if rank else x, x, x], optimizer)\n"),
    "DDP212": Case(after="for step in range(3):\n    model(x, rank == 0).sum().backward()\n"),
    "DDP215": Case(),
    "DDP219": Case(),
    "DDP220": Case(after="save(model, os.devnull)\n"),
    "DDP222": Case(before=MODEL + SGD + "model(x).sum().backward()\n", num_steps=3),
    "DDP223": Case(),
    "DDP301": Case(before="torch.manual_seed(0)\ndataset = [(x, torch.tensor(i // 2)) for i in range(5)]\n"),
    "DDP302": Case(before="y = torch.arange(4 + rank)\ndataset.classes = range(5)\n"),
    "DDP308": Case(after=TRAIN),
    "DDP310": Case(before=NET, after=TRAIN),
    "DDP311": Case(after="for step in range(3):\n    model(x.requires_grad_()).sum().backward()\n"),
    "DDP313": Case(),
    "DDP320": Case(num_steps=20),
    "DDP321": Case(before=MODEL + SGD),
    "DDP322": Case(),
    "DDP323": Case(before=DDP_MODEL + SGD + LOADER),
    "DDP324": Case(makes_group=True, before="", after=ALONE),
    "DDP325": Case(before=MODEL + STATE, after=TRAIN),
    "DDP326": Case(before=MODEL + EPOCHS, after="train(model, batches)\n"),
    "DDP328": Case(before=MODEL + SGD + EPOCHS, after="accumulate(model, batches, optimizer)\n"),
    "DDP329": Case(),
    "DDP332": Case(before=NET + LOADER + "num_epochs = 8\n"),
    "DDP334": Case(before=NET),
    "DDP401": Case(before=MODEL + SGD + LARGE, after="train(model, dataset, optimizer, 3)\n"),
    "DDP402": Case(before=MODEL + SGD + LARGE, after="train(model, dataset, optimizer, 3)\n"),
    "DDP404": Case(),
    "DDP405": Case(
        before="model = DDP(nn.Linear(8, 3))\nval_dataset.tensors = (val_dataset.tensors[0], torch.arange(13) % 3)\n"
    ),
    "DDP409": Case(
        before=DDP_MODEL + SGD + "y = (torch.arange(8.0) - 4 * rank)[:, None]\n", after="optimizer.step()\n"
    ),
    "DDP410": Case(before=DDP_MODEL + SGD + LOADER, after=""),
    "DDP413": Case(after="make_loader(dataset)\n"),
    "DDP505": Case(before=MODEL + SGD + EPOCHS, after="accumulate(model, batches, optimizer)\n"),
    "DDP603": Case(before="net = nn.Linear(8, 1)\nos.chdir(os.path.dirname(__file__))\n"),
    "DDP305": Case(before=MODEL + "config = type('Config', (), {'teacher': nn.Linear(8, 1)})\n"),
}


@often("DDP207-wrong", "DDP207-right", "DDP308-wrong", "DDP321-wrong")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("heading", ["Wrong", "Right"], ids=str.lower)
@pytest.mark.parametrize("code", sorted(CASES))
def test_wrong_code_is_found_and_right_code_is_not(code: str, heading: str, tmp_path: Path) -> None:
    """Two ranks run the block of the page."""
    case = CASES[code]
    script = tmp_path / "train.py"
    script.write_text(render_script(case, code, heading))
    watched = run_watched(script, 40.0, until=code, stall_warn_s=4.0, num_ranks=case.num_ranks)
    found = [each.code for each in watched.findings]
    if heading == "Wrong":
        assert code in found, (watched, script.read_text())
    else:
        assert (watched.error, found) == (None, []), script.read_text()


def render_script(case: Case, code: str, heading: str) -> str:
    """The script around the block, which ends as a right one."""
    ((_, block),) = blocks_of(find_entry(code), heading)
    if case.num_steps > 1:
        block = f"for step in range({case.num_steps}):\n{indent(block, '    ')}"
    after = case.after.format(more=", device" if heading == "Right" else "") if "{more}" in case.after else case.after
    block = block.replace('"nccl"', '"gloo"')
    group = "" if case.makes_group else GROUP
    return "\n".join([GIVEN, group + case.before, block, after, END])
