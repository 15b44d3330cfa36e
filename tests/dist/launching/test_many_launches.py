# SPDX-License-Identifier: Apache-2.0
"""Launch after launch, after torch was used in the parent, and nothing stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.dist.launching.scripts import run_script

NUM_LAUNCHES = 50 if os.environ.get("DDPILOT_SOAK") == "1" else 5

SOURCE = """
import gc, os, threading
import psutil, torch, ddpilot
from ddpilot.launching.rank_server.client import server_pids, stop_servers

weight = torch.ones(500, 500, requires_grad=True)
(torch.ones(500, 500) @ weight).sum().backward()  # the OpenMP pool is alive now: a fork of this process would hang

def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.nn.Linear(300, 300)(torch.ones(8, 300)).sum().detach()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total

def left():
    gc.collect()
    me = psutil.Process()
    ports = [c.laddr for p in (me, *me.children(recursive=True)) for c in p.net_connections("inet")]
    return {
        "processes": [p.pid for p in me.children(recursive=True)],
        "threads": me.num_threads(),
        "descriptors": sorted(os.readlink(path) for path in descriptors()),
        "ports": ports,
        "environ": dict(os.environ),
    }

def descriptors():
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.lexists(path)]  # not the one that listed them

launcher = ddpilot.Launcher(nproc_per_node=2, output="silent", timeout_s=60)
launcher.run(train)
before = left()
results = [launcher.run(train) for _ in range(NUM)]
assert all(torch.equal(result[0], result[1]) for result in results)
assert len({float(result[0]) for result in results}) == NUM, "each launch draws other weights"
del results
after = left()
for kind in before:
    assert before[kind] == after[kind], (kind, before[kind], after[kind])
assert after["processes"] == list(server_pids()) and after["ports"] == []
stop_servers()
assert left()["processes"] == []
print("clean")
"""


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_launches_in_a_row_leave_nothing(tmp_path: Path) -> None:
    """After a matmul and a backward in the parent: no extra process, thread, descriptor, port.

    Every test looks for new shared-memory files; see tests/conftest.py.
    """
    outcome = run_script(SOURCE.replace("NUM", str(NUM_LAUNCHES)), tmp_path, limit_s=180)
    assert outcome.out == "clean\n"


def test_script_ends_with_its_server(tmp_path: Path) -> None:
    """A script that launched ends at once, and takes its rank server along."""
    source = "import os, ddpilot\nprint(ddpilot.launch(os.getppid, nproc_per_node=1)[0])\n"
    server = int(run_script(source, tmp_path, limit_s=30).out)
    assert not Path(f"/proc/{server}").exists()


WHILE_TORCH_IS_IMPORTED = """
import threading
import ddpilot
from ddpilot.environments.interpreter import when_imported

def make(number):
    import torch
    return torch.nn.Linear(2, 2), number

found, threads = [], []

def launch(number):
    found.append(ddpilot.launch(make, number, nproc_per_node=1)[0][1])

def launch_meanwhile(_module):
    for number in range(2):
        threads.append(threading.Thread(target=launch, args=(number,)))
        threads[-1].start()
    threads[0].join(1.0)  # time to fail: it cannot come to an end before torch is complete

when_imported("torch.storage", "test", launch_meanwhile)
import torch
assert len(threads) == 2 and not found
for thread in threads:
    thread.join()
print("found", sorted(found))
"""


def test_launches_wait_for_a_thread_that_imports_torch(tmp_path: Path) -> None:
    """As in a notebook that imports torch in a background thread: a half-imported torch is not used."""
    assert "found [0, 1]" in run_script(WHILE_TORCH_IS_IMPORTED, tmp_path).out
