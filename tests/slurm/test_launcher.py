# SPDX-License-Identifier: Apache-2.0
"""Functions as jobs of a real Slurm: values and errors come back by value, as from `launch`."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ddpilot
from ddpilot.errors import LaunchTimeoutError, RankError, ShipError, SlurmError
from ddpilot.slurm.launcher import SlurmLauncher
from tests.slurm.cluster import Cluster

CELL = """
import os
import torch
import torch.distributed as dist
import ddpilot

class Sample:
    def __init__(self, number):
        self.number = number

class BadSample(Exception):
    pass

def total(start, *, factor):
    with ddpilot.init_group("gloo") as group:
        value = torch.tensor([float(group.rank + start)])
        dist.all_reduce(value)
        print("rank", group.rank, "of", group.world_size, flush=True)
        return {"sum": value * factor, "sample": Sample(group.rank), "node": os.uname().nodename}

def fail(rank):
    with ddpilot.init_group("gloo") as group:
        if group.rank == rank:
            raise BadSample(f"sample {17} of rank {rank}")
        dist.barrier()

def wait():
    import time
    time.sleep(300)

def leave():
    os._exit(3)
"""


@pytest.fixture
def cell() -> Iterator[types.ModuleType]:
    """A module whose functions are pickled by value, as those of a notebook's cells are."""
    main, before = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = main
    exec(compile(CELL, "<cell>", "exec"), vars(main))
    yield main
    sys.modules["__main__"] = before


@pytest.fixture
def launcher(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    """For jobs of two nodes with two ranks each."""
    for name, value in (*cluster.variables.items(), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return SlurmLauncher(nodes=2, nproc_per_node=2, time="5")


def test_values_of_all_ranks_come_back_by_value(
    launcher: SlurmLauncher, cell: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also instances of a class that only the notebook has; the output of all ranks is shown."""
    results = launcher.run(cell.total, 1, factor=2)
    assert [value["sum"] for value in results] == [torch.tensor([20.0])] * 4
    assert [value["sample"].number for value in results] == [0, 1, 2, 3]
    assert isinstance(results[3]["sample"], cell.Sample)
    assert [value["node"] for value in results] == ["n1", "n1", "n2", "n2"]
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"{rank}: rank {rank} of 4" for rank in range(4)]
    assert "completed after" in err


def test_launch_with_nodes_is_a_job(launcher: SlurmLauncher, cell: types.ModuleType) -> None:
    """Not silently local: the ranks are on two nodes."""
    results = ddpilot.launch(cell.total, 0, factor=1, nodes=2, nproc_per_node=1)
    assert [value["node"] for value in results] == ["n1", "n2"]


def test_error_of_any_rank_comes_back_with_its_traceback(launcher: SlurmLauncher, cell: types.ModuleType) -> None:
    """Rank 3's on the second node, not that of the ranks whose connection it closed; with the exception itself."""
    job = launcher.submit(cell.fail, 3)
    with pytest.raises(RankError, match="rank 3 raised BadSample: sample 17 of rank 3") as caught:
        job.result(timeout_s=60)
    assert caught.value.rank == 3
    assert caught.value.host == "n2"
    assert isinstance(caught.value.__cause__, cell.BadSample)
    assert "in fail" in caught.value.rank_traceback
    with pytest.raises(RankError):
        job.result()
    assert "(FAILED)" in job.status()


def test_job_that_ends_without_an_exception_is_explained(launcher: SlurmLauncher, cell: types.ModuleType) -> None:
    """By Slurm's reason: ranks that left by `os._exit`, and a job that was cancelled while a result was waited for."""
    with pytest.raises(SlurmError, match=r"\(FAILED\): exit code 3"):
        launcher.submit(cell.leave).result(timeout_s=60)
    job = launcher.submit(cell.wait)
    with pytest.raises(LaunchTimeoutError, match="waiting for `wait`: job"):
        job.result(timeout_s=0.5)
    assert not job.done()
    job.cancel()
    with pytest.raises(SlurmError, match=r"\(CANCELLED\): it was cancelled"):
        job.result(timeout_s=60)


def test_what_cannot_be_sent_is_named_before_anything_is_submitted(
    launcher: SlurmLauncher, cluster: Cluster, cell: types.ModuleType
) -> None:
    """As by `launch`; and so are wrong options."""
    with pytest.raises(ShipError, match=r"args\[0\]"):
        launcher.submit(cell.total, threading.Lock(), factor=1)
    with pytest.raises(SlurmError, match="`gpus_per_node` is 'many'"):
        ddpilot.SlurmLauncher(gpus_per_node="many")
    assert cluster.run("squeue", "--noheader").stdout == ""
