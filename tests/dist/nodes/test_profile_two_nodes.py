# SPDX-License-Identifier: Apache-2.0
"""`ddpilot profile` on two nodes whose clocks differ by 3 s: one profile, stragglers, and a merged trace."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.nodes.namespaces import Agent, TwoNodes, two_nodes

LIMIT_S = 100.0
PROFILE = (sys.executable, "-m", "ddpilot", "profile")
SCALE = (sys.executable, "-m", "ddpilot", "scale")
LATE_S = 3
OTHER_CLOCK = ("unshare", "--time", "--monotonic", LATE_S)
"""A time namespace whose CLOCK_MONOTONIC is ahead, as that of a machine that was started earlier."""
RUN = (sys.executable, "-m", "ddpilot", "run")
PROFILES_A_PART = """
import time, torch, ddpilot
loop = ddpilot.Loop(seed=0, progress=False)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(320, 64))
for part in range(2):  # each part asks for the clocks again
    with loop.profile() as profile:
        for (x,) in loop.batches(loop.loader(data, global_batch_size=16)):
            time.sleep(0.01 + 0.02 * loop.rank)  # rank 1 is late
            loop.backward(model(x).mean())
            loop.step(optimizer)
    phases = profile.profile.phases
    waits_ms, late_ms = (
        [round(1e3 * float(each)) for each in values.mean(axis=1)]
        for values in (phases.share("waiting"), phases.arrivals_s)
    )
    print(f"part {part}: {waits_ms}, {late_ms} ms; {1e3 * phases.clock_error_s:.3f}", flush=True)
"""
LOADS = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(160 * dist.get_world_size(), 64))
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data)):
    time.sleep(0.01)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
TRAINS = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(40):
    time.sleep(0.02 + 0.02 * dist.get_rank())  # rank 1 is late
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


_PART = re.compile(r"part (\d): \[(\d+), (\d+)\], \[(\d+), (\d+)\] ms; ([\d.]+)")


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two namespaces, gone after the test."""
    done = subprocess.run(list(map(str, (*OTHER_CLOCK, "true"))), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"time namespaces cannot be made here: {done.stderr.strip()}")
    with two_nodes() as both:
        yield both


def start_both(nodes: TwoNodes, script: Path, *more: object) -> tuple[Agent, Agent]:
    """`ddpilot profile` on both nodes, of which b has another clock; what a node adds stands in `more` with {node}."""
    agents = []
    for node in "ab":
        where = ["--nnodes", 2, "--node-rank", "ab".index(node), "--master-addr", nodes.addresses["a"], "-n", 1]
        own = [str(word).format(node=node) for word in more]
        command = [*PROFILE, script, *where, *own]
        agents.append(nodes.start(node, [*OTHER_CLOCK, *command] if node == "b" else command))
    return agents[0], agents[1]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


@pytest.mark.timeout(240)
def test_clocks_that_differ_by_3_s_are_aligned_in_the_profile_and_in_the_trace(nodes: TwoNodes, tmp_path: Path) -> None:
    """Rank 1 is named, who is 20 ms late; all_reduces of both sides overlap, and end within 2 ms of each other."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    for node in "ab":
        (tmp_path / node).mkdir()
    a, b = start_both(nodes, script, "--trace", tmp_path / "{node}")
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [0, 0], a.describe_all()
    assert "node 1 has sent what its ranks recorded to node 0" in b.text
    assert "updates of 2 ranks" in a.text
    assert "clocks of nodes compared within" in a.text
    assert re.search(r"rank 1 is last in \d+% of updates", a.text), a.text
    assert "updates of 2 ranks" not in b.text
    events = read_events(tmp_path / "a" / "trace.json.gz")
    calls = [
        sorted((each["ts"], each["ts"] + each["dur"]) for each in events if _is_all_reduce(each, rank))
        for rank in (0, 1)
    ]
    assert len(calls[0]) == len(calls[1]) >= 5
    pairs = list(zip(*calls, strict=True))
    assert all(first[0] < second[1] + 2000 and second[0] < first[1] + 2000 for first, second in pairs), calls
    assert abs(statistics.median(first[1] - second[1] for first, second in pairs)) < 2000, calls


def _is_all_reduce(event: dict[str, Any], rank: int) -> bool:
    is_call = event.get("ph") == "X" and "gloo:all_reduce" in event["name"]
    return is_call and int(event["pid"]) // 1000 == rank


@pytest.mark.timeout(240)
def test_parts_of_a_program_on_two_nodes_are_profiled_on_all_ranks(nodes: TwoNodes, tmp_path: Path) -> None:
    """Every rank has the profile of both, by one clock: rank 0 waits the 20 ms by which rank 1 is late."""
    script = tmp_path / "train.py"
    script.write_text(PROFILES_A_PART)
    agents = []
    for node in "ab":
        where = ["--nnodes", 2, "--node-rank", "ab".index(node), "--master-addr", nodes.addresses["a"], "-n", 1]
        command = [*RUN, *where, script]
        agents.append(nodes.start(node, [*OTHER_CLOCK, *command] if node == "b" else command))
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0], agents[0].describe_all()
    for agent in agents:
        found = _PART.findall(agent.text)
        assert [part for part, *_ in found] == ["0", "1"], agent.text
        for _, waited_ms, waited_late_ms, early_ms, late_ms, error_ms in found:
            assert 15 < int(waited_ms) < 35
            assert int(waited_late_ms) < 5
            assert int(early_ms) < 5
            assert 15 < int(late_ms) < 35
            assert 0 < float(error_ms) < 2


@pytest.mark.timeout(240)
def test_scale_runs_on_one_node_and_on_both(nodes: TwoNodes, tmp_path: Path) -> None:
    """Node 0 alone with 1 and 2 ranks, and both nodes with 2: four ranks, whose group was measured between nodes."""
    script = tmp_path / "train.py"
    script.write_text(LOADS)
    agents = []
    for node in "ab":
        where = ["--nnodes", 2, "--node-rank", "ab".index(node), "--master-addr", nodes.addresses["a"]]
        agents.append(nodes.start(node, [*SCALE, script, *where, "-n", "1,2", "--rounds", 1]))
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0], agents[0].describe_all()
    rows = [line.split()[0] for line in agents[0].text.splitlines() if line[:1].isdecimal()]
    assert rows == ["1", "2", "4", "8"], agents[0].text
    assert "as measured between nodes" in agents[0].text
