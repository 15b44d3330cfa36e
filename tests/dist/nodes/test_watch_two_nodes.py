# SPDX-License-Identifier: Apache-2.0
"""Findings on each of two nodes if ranks of one wait for ranks of the other, or differ from them."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ddpilot.module_names import OBSERVER_PROCESS
from tests.dist.nodes.namespaces import DDPILOT, TORCHRUN, Agent, TwoNodes, two_nodes
from tests.soak import often, soak

LIMIT_S = 100.0
BEGIN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(64)
for step in range(20):
    dist.all_reduce(x)
print("they have met", flush=True)
"""
PARTS = """
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(x)
"""
SLEEPS = """
if rank == 1:
    time.sleep(8)  # as a checkpoint, or a download
dist.all_reduce(x)
print("all is well", flush=True)
"""
END = "dist.destroy_process_group()  # torch 2.13 aborts many a process that ends without, unless it is watched\n"
SLOW = """
for step in range(6):
    time.sleep(1.2 * rank)
    dist.all_reduce(x)
print("all is well", flush=True)
"""
OTHER_SIZE = """
dist.all_reduce(torch.ones(64 + 64 * rank))
"""
OTHER_REDUCE_OP = """
for step in range(4000):
    dist.all_reduce(x, op=dist.ReduceOp.MAX if rank and step >= 10 else dist.ReduceOp.SUM)
    x.fill_(1.0)
    time.sleep(0.05)
"""
TRAINS = """
import sys, time, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
right, passed_by = (DDP(nn.Linear(8, 4)) for _ in range(2))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (right, passed_by)]
is_wrong = len(sys.argv) > 1
num_samples = 4 * (60 - 20 * rank * is_wrong)
torch.manual_seed(rank * (not is_wrong))
loader = DataLoader(torch.randn(num_samples, 8), batch_size=4)
for step, x in enumerate(loader):
    right(x).square().mean().backward()
    model = passed_by.module if is_wrong else passed_by
    model(torch.randn(4, 8) + rank).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.03)
    if step == 39:
        break
print("done", flush=True)
time.sleep(4 * is_wrong)  # what is found at the end comes to node 1, too
"""


ENABLE = "import ddpilot.watch; ddpilot.watch.enable()"


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two namespaces, gone after the test."""
    with two_nodes() as both:
        yield both


def start_both(
    nodes: TwoNodes, folder: Path, program: str, *more: str, of_one: str = "", after: Sequence[str] = ()
) -> tuple[Agent, Agent]:
    """`ddpilot run` of the program on both nodes, with their jobs in folders of their own; `of_one`: of node 1;
    `after`: the program's own words.

    Of one that enables the watch itself: torchrun.
    """
    script = folder / "train.py"
    script.write_text(program if "init_process_group" in program else BEGIN + program)
    sizes = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", nodes.addresses["a"], "--master-port", 29500]
    launcher = TORCHRUN if ENABLE in program else DDPILOT
    a, b = (
        nodes.start(
            node,
            [*launcher, *sizes, "--node-rank", number, *more, *([of_one] if number and of_one else []), script, *after],
            DDPILOT_JOBS_DIR=str(folder / node),
            GLOO_SOCKET_IFNAME=nodes.interfaces[node],
            LINES="200",  # what is found at once takes at most a screen
        )
        for number, node in enumerate("ab")
    )
    return a, b


@pytest.mark.timeout(240)
def test_a_rank_that_sleeps_is_named_and_then_different_collectives_on_both_nodes(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    """A sleep: one line on both nodes, with where the rank's Python is, and training goes on, with nothing found.

    Then code, ranks and lines, seconds after they diverge; also in the saved report, which covers all ranks.
    """
    nodes.forks_ranks = False
    a, b = start_both(nodes, tmp_path, SLEEPS + PARTS)
    slept_s = a.wait_for("all is well", LIMIT_S)
    said_s = a.wait_for("desync  DDP201  collective #21 of the default group differs between ranks", LIMIT_S)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    assert said_s - slept_s < 20  # alone on the machine it is two
    for agent in (a, b):
        asleep = agent.text.partition("all is well")[0]
        lines = [line for line in asleep.splitlines() if line.startswith("ddpilot:")]
        assert len(lines) == 1, agent.text
        assert re.search(
            r"rank 0 has waited \d\.\d s in all_reduce \(#20 of the default group\) at \S*train.py:11; "
            r"rank 1 has not called it: \S*train.py:10  time.sleep\(8\)",
            lines[0],
        )
        assert "DDP2" not in asleep
        final = agent.text[agent.text.rindex("desync  DDP201") :]
        # A rank writes down the reduce-op a moment after the call, which a busy machine may compare before that.
        assert re.search(r"rank 0  all_reduce (SUM )?of float32 \[64\] +\S*train.py:17  dist.all_reduce\(x\)", final)
        assert re.search(r"rank 1  barrier +\S*train.py:15  dist.barrier\(\)", final)
        assert re.search(r"is inside `if rank == 1:` \(\S*train.py:14\)", final)
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("[ab]/*/report.json")]
    assert "DDP201" in {finding["code"] for report in saved for finding in report["findings"]}
    assert [] in [report["unseen"] for report in saved]


@pytest.mark.timeout(240)
@soak
def test_tensors_that_differ_in_size_between_nodes_are_named(nodes: TwoNodes, tmp_path: Path) -> None:
    """gloo aborts a rank of one node or the other: both nodes show what both ranks gave."""
    a, b = start_both(nodes, tmp_path, OTHER_SIZE)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    for agent in (a, b):
        final = agent.text[agent.text.rindex("size-mismatch  DDP202  collective #20") :]
        assert "differs between ranks in size: 64 and 128 elements" in final
        assert re.search(r"rank 0  all_reduce .*float32 \[64\].*train.py:9", final)
        assert re.search(r"rank 1  all_reduce .*float32 \[128\].*train.py:9", final)


@pytest.mark.timeout(240)
def test_a_reduce_op_that_differs_between_nodes_is_named_though_nobody_waits(nodes: TwoNodes, tmp_path: Path) -> None:
    """In every step; the digests that the nodes write every 30 s show it, and the job ends by it on both nodes."""
    a, b = start_both(nodes, tmp_path, OTHER_REDUCE_OP)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    for agent in (a, b):
        final = agent.text[agent.text.rindex("reduce-op-mismatch  DDP204  collective #") :]
        assert re.search(r"rank 0  all_reduce SUM of float32 \[64\] +\S*train.py:10", final)
        assert re.search(r"rank 1  all_reduce MAX of float32 \[64\] +\S*train.py:10", final)


@pytest.mark.timeout(240)
def test_guard_compares_ranks_of_two_nodes(nodes: TwoNodes, tmp_path: Path) -> None:
    """Differing parameters, equal batches and unequal numbers of batches are reported on both, with ranks and lines."""
    a, b = start_both(nodes, tmp_path, TRAINS, "--on-finding", "report", after=["wrong"])
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [0, 0], a.text + b.text
    for agent in (a, b):
        text = " ".join(agent.text.split())
        assert re.search(r"bypass DDP321 gradients differ between ranks at step \d+, parameters at step", text)
        assert re.search(r"same-batch DDP401 .*ranks 0,1", text)
        assert re.search(r"unequal-batches DDP404 .*rank 1 has 40 batches in this epoch, rank 0 has 60", text), text
        for line in ("model(torch.randn(4, 8) + rank)", "for step, x in enumerate(loader):"):
            assert line in text
        assert set(re.findall(r"DDP[0-9]{3}", text)) == {"DDP321", "DDP401", "DDP404"}


@pytest.mark.timeout(240)
@often("other batches on each rank, models that are called themselves")
@pytest.mark.parametrize(
    ("program", "last_words"),
    [
        pytest.param(TRAINS, "done", id="other batches on each rank, models that are called themselves"),
        pytest.param(SLOW, "all is well", id="a slow node, looked at from the other at every step"),
    ],
)
def test_two_nodes_are_quiet_about_what_is_right(
    nodes: TwoNodes, tmp_path: Path, program: str, last_words: str
) -> None:
    """Both nodes finish without a finding."""
    a, b = start_both(nodes, tmp_path, program)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [0, 0], a.text + b.text
    for agent in (a, b):
        assert last_words in agent.text
        assert "ddpilot:" not in agent.text


@pytest.mark.timeout(240)
def test_a_node_that_nobody_watches_is_said_once_and_training_goes_on(nodes: TwoNodes, tmp_path: Path) -> None:
    """With `--no-watch` there: its rank is not observed."""
    a, b = start_both(nodes, tmp_path, SLEEPS + END, of_one="--no-watch")
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [0, 0], a.text + b.text
    assert len(re.findall(r"are not visible from here: its observer does not respond", a.text)) == 1
    assert len(re.findall(r"the state of rank 1 is not known here", a.text)) == 1
    assert "ddpilot:" not in b.text


@pytest.mark.timeout(240)
def test_observers_under_torchrun_reach_each_other(nodes: TwoNodes, tmp_path: Path) -> None:
    """Through the store of the ranks: the first observer reports ranks and lines of both nodes, and ends its rank."""
    a, b = start_both(nodes, tmp_path, ENABLE + BEGIN + PARTS)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    said = [agent.text for agent in (a, b) if "desync  DDP201  collective #20 of the default group" in agent.text]
    assert said, a.text + b.text
    for text in said:
        assert re.search(r"rank 0  all_reduce SUM of float32 \[64\] +\S*train.py:12", text)
        assert re.search(r"rank 1  barrier +\S*train.py:10", text)


@pytest.mark.timeout(240)
def test_an_observer_that_is_killed_is_said_once_and_training_goes_on(nodes: TwoNodes, tmp_path: Path) -> None:
    """That of node 1: its rank is not observed from node 0, which shows a notice."""
    a, b = start_both(nodes, tmp_path, ENABLE + BEGIN + SLEEPS + END)
    b.wait_for("they have met", LIMIT_S)
    found = [psutil.Process(pid) for pid in nodes.pids()]
    (killed,) = [
        each for each in found if OBSERVER_PROCESS in each.cmdline() and str(tmp_path / "b") in str(each.cmdline())
    ]
    killed.send_signal(signal.SIGKILL)
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [0, 0], a.text + b.text
    assert len(re.findall(r"ddpilot: the ranks of node 1.*are not visible from here", a.text)) == 1
    assert "ddpilot:" not in b.text
