# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run` with scripts that know nothing of ddpilot, on emulated accelerators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.accelerator import environment, why_not
from tests.dist.launching.scripts import Outcome
from tests.dist.run.commands import run, write
from tests.soak import often, soak

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(150),
]

BEGIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
device = torch.device("emu", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,emu:eccl")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double().to(device)
model = DistributedDataParallel(net, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
def step():
    optimizer.zero_grad()
    loss = model(x[rank::num_ranks].to(device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
TRAIN = """
for _ in range(5):
    step()
if rank == 0:
    print("weights", json.dumps([value for weight in net.parameters() for value in weight.flatten().tolist()]))
dist.destroy_process_group()
"""
RAISE = """
for number in range(5):
    if rank == 1 and number == 3:
        raise ValueError("bad sample")
    step().item()
"""
HANG = """
for number in range(5):
    if rank == 1 and number == 3:
        time.sleep(1)
        dist.broadcast(torch.ones(3, device=device), src=1)
    step().item()
"""
ONCE = """
step().item()
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "on", device, flush=True)
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("only the first time")
step().item()
dist.destroy_process_group()
"""


def run_script(folder: Path, source: str, *words: object, num_ranks: int = 2) -> Outcome:
    """What came of the script on so many devices."""
    write(folder, "train.py", BEGIN + source)
    return run(folder, "--nproc-per-node", num_ranks, *words, "train.py", **environment(num_ranks))


@often("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_run_trains_with_the_numbers_of_one_process_on_the_cpu(tmp_path: Path, num_ranks: int) -> None:
    """A torchrun script in float64, to 1e-10: all ranks have as many samples."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
    for _ in range(5):
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for weight in net.parameters():
                assert weight.grad is not None
                weight.sub_(0.1 * weight.grad)
    done = run_script(tmp_path, TRAIN, num_ranks=num_ranks)
    assert done.code == 0, done
    (line,) = [line for line in done.out.splitlines() if "weights" in line]
    expected = [value for weight in net.parameters() for value in weight.flatten().tolist()]
    assert json.loads(line.partition("weights ")[2]) == pytest.approx(expected, rel=1e-10)


@soak
def test_run_ends_a_rank_that_waits_for_its_device_and_names_the_one_that_failed(tmp_path: Path) -> None:
    """The exit status is torchrun's."""
    done = run_script(tmp_path, RAISE)
    assert done.code == 1
    assert "rank 1 raised ValueError: bad sample" in done.err


def test_run_stops_ranks_that_are_in_different_collectives_and_shows_both_lines(tmp_path: Path) -> None:
    """Found from outside: neither rank's host stands in a collective."""
    done = run_script(tmp_path, HANG)
    assert done.code == 1
    assert "DDP201" in done.err
    assert "dist.broadcast(torch.ones(3, device=device), src=1)" in done.err
    assert "loss.backward()" in done.err


@soak
def test_run_starts_the_ranks_again_on_their_devices(tmp_path: Path) -> None:
    """A new process has a device that works, and the rank's own."""
    done = run_script(tmp_path, ONCE, "--max-restarts", 1)
    assert done.code == 0, done
    for rank in range(2):
        assert f"attempt 1 on emu:{rank}" in done.out
