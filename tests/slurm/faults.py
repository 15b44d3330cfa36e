# SPDX-License-Identifier: Apache-2.0
"""Faults that strike a job on the simulated Slurm, each with what has to be reported about it."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.dist.launching.scripts import wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import EPOCHS

PROGRAM = (
    """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import ddpilot

scratch, fsync_s = sys.argv[1], float(sys.argv[2])
fsync = os.fsync

def slow_fsync(descriptor):
    time.sleep(fsync_s)
    fsync(descriptor)

os.fsync = slow_fsync

def pause_s():
    try:
        with open(f"{scratch}/pause_s") as file:
            return float(file.read() or 0)
    except FileNotFoundError:
        return 0.0

torch.set_default_dtype(torch.float64)
with ddpilot.init_group("gloo") as group:
    with open(f"{scratch}/rank{group.rank}", "w") as file:
        print(os.getpid(), os.uname().nodename, file=file)
"""
    + EPOCHS
    + """\
            loss = torch.nn.functional.mse_loss(model(x), y)
            loop.backward(loss)
            loop.step(optimizer)
            value = loop.reduce(loss).item()
            if loop.rank == 0:
                with open(f"{scratch}/losses", "a") as file:
                    print(loop.num_updates, value.hex(), file=file)
                with open("log", "a") as file:
                    print(loop.num_updates, "x" * 5000, file=file)  # a full disk ends the training
            since_s = time.monotonic()
            while time.monotonic() < since_s + pause_s():
                time.sleep(0.05)
    loop.print("trained", loop.num_updates, flush=True)
"""
)
"""60 updates; arguments: a folder for the test's own files, and how many seconds the disk takes for an fsync.

Each update takes as many seconds as the folder's file `pause_s` has, none without it.
"""


@dataclass
class Job:
    """A running job of two nodes with one rank each, and its files."""

    cluster: Cluster
    job_id: str
    folder: Path
    """Where it runs: the full disk in some tests."""
    scratch: Path
    """The test's own folder, on a disk that is never full."""
    rng: random.Random

    def place(self, rank: int) -> tuple[int, str]:
        """Process and node of a rank."""
        pid, node = (self.scratch / f"rank{rank}").read_text().split()
        return int(pid), node

    def rows(self) -> list[tuple[int, str]]:
        """Number and loss of each update so far, with those that were made again."""
        path = self.scratch / "losses"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(number), value) for number, value in (line.split() for line in lines)]

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written now."""
        return any(self.folder.glob("ckpt/*/.lock"))


def cancel_step(job: Job) -> str:
    """`scancel` of the step of the ranks."""
    job.cluster.run("scancel", f"{job.job_id}.0")
    return rf"step {job.job_id}\.0 was cancelled, .*it ran on n\[?\d"


def kill_rank(job: Job) -> str:
    """SIGKILL for one rank."""
    return _kill(job, job.rng.randrange(2))


def _kill(job: Job, rank: int) -> str:
    pid, node = job.place(rank)
    os.kill(pid, signal.SIGKILL)
    return rf"(task {rank} on {node} was|first failure: on {node}: rank {rank} was) killed by SIGKILL"


def kill_slurmd(job: Job) -> str:
    """SIGKILL for the daemon of one of the nodes, whose rank lives on."""
    _, node = job.place(job.rng.randrange(2))
    job.cluster.kill_slurmd(node)
    return rf"was requeued after .* on \S*: node {node} failed \(Not responding\)"


def cut_link(job: Job) -> str:
    """The cable of one of the nodes is pulled."""
    _, node = job.place(job.rng.randrange(2))
    job.cluster.cut(node)
    return rf"was requeued after .* on \S*: node {node} failed \(Not responding\)"


def fill_disk(job: Job) -> str:
    """No byte is left in the folder of the job, its output and its checkpoints."""
    fill(job.folder)
    return rf"no space is left in {re.escape(str(job.folder))}, .*it ran on n\[?\d"


def fill(folder: Path) -> None:
    """Write a file until the file system is full."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(1))
        except OSError:
            pass


def reach_time_limit(job: Job) -> str:
    """The limit comes; the job was not submitted with a signal before it."""
    job.cluster.run("scontrol", "update", f"JobId={job.job_id}", "EndTime=now+1")
    return r"\(TIMEOUT.*\): its time limit of \S+ was reached(.*\n)+.*it ran on n\[?\d"


def near_time_limit(job: Job) -> str:
    """The signal comes that the job asked for, 60 s before the limit."""
    job.cluster.run("scontrol", "update", f"JobId={job.job_id}", "EndTime=now+61")
    return r"was requeued after .* on n.*: its ranks saved a checkpoint and exited with code 75 after SIGUSR1"


def requeue_in_save(job: Job) -> str:
    """`scontrol requeue` while a checkpoint is being written."""
    wait_until(job.is_saving, limit_s=60)
    job.cluster.run("scontrol", "requeue", job.job_id)
    return r"was requeued after .* on n.*: by `scontrol requeue`"


def kill_in_save(job: Job) -> str:
    """SIGKILL for the rank that is writing a checkpoint."""
    wait_until(job.is_saving, limit_s=60)
    return _kill(job, 0)


@dataclass(frozen=True)
class Fault:
    """`strike`: does it, and returns a pattern of what has to be reported. `fsync_s`: how slow the disk is."""

    strike: Callable[[Job], str]
    options: tuple[str, ...] = ()
    fsync_s: float = 0.0
    is_requeued: bool = False
    """Whether Slurm starts the job again by itself; otherwise the same command is submitted again."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.strike.__name__


FAULTS = (
    Fault(cancel_step),
    Fault(kill_rank),
    Fault(kill_slurmd, is_requeued=True),
    Fault(cut_link, is_requeued=True),
    Fault(fill_disk),
    Fault(reach_time_limit, ("--signal=USR1@0",)),
    Fault(near_time_limit, ("--signal=USR1@60",), is_requeued=True),
    Fault(requeue_in_save, fsync_s=0.3, is_requeued=True),
    Fault(kill_in_save, fsync_s=0.3),
)
LAUNCHERS = ("python", "python", "ddpilot")
