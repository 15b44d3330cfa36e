# SPDX-License-Identifier: Apache-2.0
"""A script that knows nothing of being watched, under `DDPILOT_WATCH=1 srun`, on one node of Slurm's and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.watch.job_folder import list_jobs
from tests.dist.launching.scripts import wait_until
from tests.dist.watch.test_scripts import observers, variables
from tests.slurm.cluster import Cluster
from tests.soak import often, soak

TRAIN = """
import torch, torch.distributed as dist, ddpilot
with ddpilot.init_group("gloo") as group:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(5):
        model(torch.rand(8, 4)).sum().backward()
        {wrong}
    print("through", group.rank, flush=True)
    del model
"""
WRONG = "_ = dist.barrier() if group.rank == 1 and step == 2 else None"


def srun(
    folder: Path, cluster: Cluster, num_nodes: int, wrong: str, num_ranks: int = 4
) -> subprocess.CompletedProcess[str]:
    """The ranks, watched by the variable alone, to their end."""
    (folder / "train.py").write_text(TRAIN.format(wrong=wrong))
    line = next(text for text in Path("setup.py").read_text().splitlines() if text.startswith("LINE = "))
    site = folder / "site"
    site.mkdir()
    (site / "ddpilot_watch.pth").write_text(line.removeprefix('LINE = "').removesuffix('\\n"') + "\n")
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    env = variables(folder)
    env |= cluster.variables | {"MASTER_ADDR": "n1", "MASTER_PORT": "29519", "GLOO_SOCKET_IFNAME": "eth0"}
    env |= {"DDPILOT_WATCH": "1", "PYTHONPATH": os.pathsep.join((str(site), env["PYTHONPATH"]))}
    return subprocess.run(
        ["srun", f"--nodes={num_nodes}", f"--ntasks={num_ranks}", sys.executable, "train.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.timeout(240)
@often("2")
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_srun_ends_with_the_finding_and_a_status(cluster: Cluster, tmp_path: Path, num_nodes: int) -> None:
    """The ranks, the line and the branch around it are named, and nothing is left but the report."""
    done = srun(tmp_path, cluster, num_nodes, WRONG)
    assert done.returncode != 0
    assert "ddpilot: desync  DDP201  collective #" in done.stderr
    assert re.search(r"^ +rank 1 +barrier +train\.py:7 ", done.stderr, re.MULTILINE)
    assert "through" not in done.stdout
    wait_until(lambda: not observers(tmp_path), limit_s=20)
    jobs = list_jobs(tmp_path / "jobs")
    assert len(jobs) == num_nodes
    assert not any(about.is_running for _, about in jobs)
    assert any(
        "DDP201" in (folder / "report.txt").read_text() for folder, _ in jobs if (folder / "report.txt").exists()
    )


@pytest.mark.timeout(240)
@soak
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_srun_of_a_right_script_ends_well_and_leaves_nothing(cluster: Cluster, tmp_path: Path, num_nodes: int) -> None:
    """No finding, no process, no folder."""
    done = srun(tmp_path, cluster, num_nodes, "", num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"through {rank}" for rank in range(2)]
    assert "ddpilot explain" not in done.stderr  # it may be said that ranks wait for one that is slow to come
    wait_until(lambda: not observers(tmp_path), limit_s=20)
    assert list_jobs(tmp_path / "jobs") == []
