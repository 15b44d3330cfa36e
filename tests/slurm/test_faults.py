# SPDX-License-Identifier: Apache-2.0
"""Faults at random moments of a job: each is named with its node and cause, nothing is left, and training resumes."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.launching.scripts import wait_until
from tests.slurm.cluster import Cluster, running_cluster, why_not
from tests.slurm.faults import FAULTS, LAUNCHERS, PROGRAM, Fault, Job
from tests.slurm.jobs import Followed, following
from tests.soak import SOAK

SEED = 19
NUM = 30
NAMED_S = 5.0
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 16 MB that all nodes share; it has to be there before the nodes are."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True, timeout=20)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=20)


@pytest.fixture(scope="module")
def cluster_of_module(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm whose nodes see that disk."""
    del disk
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def straight(cluster_of_module: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a job that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    with following(cluster_of_module, folder, PROGRAM, "--nodes=2", "--", str(folder), "0") as followed:
        assert followed.wait() == 0, followed.out + followed.err
        return dict(Job(cluster_of_module, followed.job_id, folder, folder, random.Random()).rows())


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    """A folder on the small disk, gone after the test."""
    folder = disk / "job"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def scenarios() -> list[tuple[int, Fault, str]]:
    """Number, fault and launcher: every fault three times, and some more."""
    rng = random.Random(SEED)
    faults = [*FAULTS, *FAULTS, *FAULTS, *rng.sample(FAULTS, NUM - 3 * len(FAULTS))]
    rng.shuffle(faults)
    return [(number, fault, rng.choice(LAUNCHERS)) for number, fault in enumerate(faults)]


CASES = scenarios()
QUICK_NUMBER = next(number for number, fault, launcher in CASES if (fault.name, launcher) == ("kill_rank", "python"))
"""The case that `make test-slurm` runs: the first of its fault with ranks that srun starts."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("number", "fault", "launcher"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1].name}-{case[2]}", marks=() if case[0] == QUICK_NUMBER else SOAK)
        for case in CASES
    ],
)
def test_fault_is_named_and_training_resumes_exactly(
    cluster: Cluster,
    folder: Path,
    tmp_path: Path,
    straight: dict[int, str],
    number: int,
    fault: Fault,
    launcher: str,
) -> None:
    """Within five seconds of Slurm's knowing it; then all losses are those of a job that nothing happened to."""
    rng = random.Random(f"{SEED} {number}")
    moment = rng.randrange(3, 50) if "save" not in fault.name else rng.choice([15, 35])
    pause = tmp_path / "pause_s"
    pause.write_text("0.1")
    words = ("--nodes=2", "--requeue", f"--launcher={launcher}", *fault.options, "--", str(tmp_path))
    with following(cluster, folder, PROGRAM, *words, str(fault.fsync_s)) as followed:
        job = Job(cluster, followed.job_id, folder, tmp_path, rng)
        wait_until(lambda: job.rows() != [] and job.rows()[-1][0] >= moment, limit_s=60)
        said = fault.strike(job)
        pause.write_text("3")
        known_s = _known_by_slurm(job)
        pause.unlink()
        named_s = _named(followed, said)
        status = followed.wait(limit_s=120)
    _heal(cluster, folder)
    assert named_s - known_s <= NAMED_S, f"{named_s - known_s:.1f} s\n{followed.err}"
    if status != 0:
        assert not fault.is_requeued, followed.out + followed.err
        with following(cluster, folder, PROGRAM, *words, "0") as again:
            assert again.wait(limit_s=100) == 0, again.out + again.err
    assert sorted(dict(job.rows())) == list(range(1, 61))
    assert [row for row in job.rows() if straight[row[0]] != row[1]] == []
    _await_nothing_left(cluster)


def _known_by_slurm(job: Job) -> float:
    """When Slurm's record of the job showed that it had ended or was to start again."""
    deadline_s = time.monotonic() + 100
    while time.monotonic() < deadline_s:
        text = job.cluster.run("scontrol", "--oneliner", "show", "job", job.job_id, check=False).stdout
        if "Restarts=0" not in text or any(f"JobState={state} " in text for state in _ENDS):
            return time.monotonic()
        time.sleep(0.05)
    raise TimeoutError(f"Slurm did not notice:\n{text}\n{(job.folder / f'slurm-{job.job_id}.out').read_text()}")


def _named(followed: Followed, said: str) -> float:
    """When that was reported."""
    pattern = re.compile(said, re.DOTALL)
    try:
        wait_until(lambda: pattern.search(followed.err) is not None or followed.process.poll() is not None, limit_s=30)
        followed.wait() if followed.process.poll() is not None else None
    finally:
        assert pattern.search(followed.err), f"{said}\n--- has not been reported:\n{followed.err}\n{followed.out}"
    return next(at_s for at_s, text in followed.times_s if pattern.search(text))


def _heal(cluster: Cluster, folder: Path) -> None:
    """Bring nodes back and make room on the disk, as an administrator does."""
    (folder / "filler").unlink(missing_ok=True)
    cluster.bring_back()


def _await_nothing_left(cluster: Cluster) -> None:
    """Neither a job nor a process of one. A node that was cut off ends the job's script once its slurmd is back."""
    assert cluster.run("squeue", "--noheader").stdout == ""
    wait_until(lambda: not any(map(cluster.job_pids, cluster.nodes)), limit_s=60)
