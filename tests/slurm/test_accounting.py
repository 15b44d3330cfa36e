# SPDX-License-Identifier: Apache-2.0
"""Jobs that slurmctld has forgotten: what sacct reports from a real slurmdbd, next to what scontrol had reported."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpilot.errors import RankError, SlurmError
from ddpilot.slurm.commands import read_accounting, read_job, read_jobs
from ddpilot.slurm.follow import summarize_job
from ddpilot.slurm.launcher import SlurmJob, SlurmLauncher
from tests.dist.launching.scripts import wait_until
from tests.slurm import accounting
from tests.slurm.cluster import CGROUPS, PATH, Cluster, why_not
from tests.slurm.jobs import DDPILOT, PYTHON

OK = "print('hello')\n"
SLEEP = "import time; print('sleeping', flush=True); time.sleep(300)\n"
STAY = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('sleeping', flush=True)\n" + SLEEP
FAIL = """
import os, pathlib, time, traceback
if os.environ["RANK"] == "1":
    try:
        raise ValueError("bad sample 17")
    except ValueError:
        traceback.print_exc()
    written = pathlib.Path(f"slurm-{os.environ['SLURM_JOB_ID']}.out")
    while "bad sample 17" not in written.read_text():  # srun may end a step before it has written what tasks wrote
        time.sleep(0.01)
    os._exit(1)
time.sleep(300)
"""
EAT = "held = [bytearray(10 << 20) for _ in range(60)]\n"
TASK = "import os, sys\nsys.exit(3 * (os.environ['SLURM_ARRAY_TASK_ID'] == '1'))\n"
AGAIN = """
import os, subprocess, sys, time
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    time.sleep(300)
sys.exit(4)
"""
LIMITS_MEMORY = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()

ENDS = {
    "ok": "completed",
    "fail": "(FAILED): exit code 1 of task 1, after which srun ended the others",
    "time": "(TIMEOUT): its time limit of 00:01:00 was reached",
    "node": "(NODE_FAIL): ",
    "preempted": "(PREEMPTED): a job of higher priority took its nodes",
    "cancelled": "(CANCELLED): it was cancelled",
    "pending": "(CANCELLED): it was cancelled",
    "again": "(FAILED, requeued 1x before): exit code 4",
    **({"memory": "(FAILED, OUT_OF_MEMORY): it used more memory than it had asked for"} if LIMITS_MEMORY else {}),
}
"""By name of a job, its end in the summary."""


def add(first: int, second: int) -> int:
    """A function for `SlurmLauncher`."""
    return first + second


def refuse() -> None:
    """One that fails."""
    raise ValueError("bad sample 17")


@dataclass
class Ended:
    """Jobs that have ended and were forgotten. `said`: the summary of each, by name, while scontrol knew it."""

    cluster: Cluster
    numbers: dict[str, str]
    said: dict[str, str]
    functions: tuple[SlurmJob, SlurmJob]


def submit(cluster: Cluster, folder: Path, name: str, program: str, *words: str) -> str:
    """Submit a program in a folder of its own; its number."""
    (folder / name).mkdir()
    (folder / name / "train.py").write_text(program)
    command = (*DDPILOT, "train.py", *PYTHON, "--no-follow", "--mem=200M", *words)
    return cluster.run(*command, cwd=folder / name).stderr.split()[-1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """One job for each way to end, on a Slurm with accounts."""
    if reason := why_not() or accounting.why_not(PATH):
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), limits_memory=LIMITS_MEMORY, keeps_accounts=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        try:
            cluster.open()
            yield _run_jobs(cluster, tmp_path_factory.mktemp("jobs"))
        finally:
            cluster.close()


def _sleeps(output: Path) -> bool:
    return output.exists() and "sleeping" in output.read_text()


def _run_jobs(cluster: Cluster, folder: Path) -> Ended:
    on_n4 = ("--nodelist=n4", "--no-requeue")
    numbers = {
        "node": submit(cluster, folder, "node", SLEEP, *on_n4),
        "time": submit(cluster, folder, "time", SLEEP, "--time=1", "--nodelist=n1"),
        "preempted": submit(
            cluster, folder, "preempted", STAY, "--partition=low", "--nodelist=n3", "--no-requeue", "--exclusive"
        ),
        "again": submit(cluster, folder, "again", AGAIN, "--nodelist=n2", "--launcher=python"),
        "ok": submit(cluster, folder, "ok", OK, "--exclude=n[3-4]"),
        "fail": submit(cluster, folder, "fail", FAIL, "--nodes=2", "--nodelist=n[1-2]"),
        "cancelled": submit(cluster, folder, "cancelled", SLEEP, "--exclude=n[3-4]"),
        "pending": submit(cluster, folder, "pending", SLEEP, "--begin=now+1hour"),
        "array": submit(cluster, folder, "array", TASK, "--array=0-3%2", "--exclude=n[3-4]"),
    }
    if LIMITS_MEMORY:
        numbers["memory"] = submit(cluster, folder, "memory", EAT, "--exclude=n[3-4]")
    launcher = SlurmLauncher(folder=folder / "functions", nodes=2, mem="200M", exclude="n[3-4]")
    functions = launcher.submit(add, 1, second=2), launcher.submit(refuse)
    for name in ("node", "time", "preempted", "cancelled"):
        wait_until(functools.partial(_sleeps, folder / name / f"slurm-{numbers[name]}.out"))
    cluster.kill_slurmd("n4")
    cluster.run("scontrol", "update", f"JobId={numbers['time']}", "EndTime=now+1")
    cluster.run("sbatch", "--partition=urgent", "--nodelist=n3", "--mem=200M", "--output=/dev/null", "--wrap", "true")
    cluster.run("scancel", numbers["cancelled"], numbers["pending"])
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout, limit_s=100)
    said = {name: str(summarize_job(read_job(number))) for name, number in numbers.items()}
    cluster.forget_jobs()
    return Ended(cluster, numbers, said, functions)


@pytest.mark.parametrize("name", ENDS)
def test_end_of_a_forgotten_job_is_that_of_scontrol(ended: Ended, name: str) -> None:
    """State, cause, restarts and output come from sacct, and from the file of the default name."""
    record = read_job(ended.numbers[name])
    found = str(summarize_job(record))
    assert ENDS[name] in ended.said[name]
    assert ENDS[name] in found
    assert record.number == ended.numbers[name]
    if name == "fail":
        assert found == ended.said[name]
        assert "first error in the output: task 1: ValueError: bad sample 17" in found


def test_end_of_a_step_is_known_without_its_output(ended: Ended) -> None:
    """From the accounts alone: the code of the rank that failed, not that of those which srun ended."""
    number = ended.numbers["fail"]
    found = summarize_job(read_job(number), "")
    assert found.cause.endswith(f"(FAILED): exit code 1 of step {number}.0")
    assert [each.job_id for each in read_accounting(number)] == [number, f"{number}.batch", f"{number}.0"]


@pytest.mark.skipif(not LIMITS_MEMORY, reason="this machine has no memory cgroup of version 1")
def test_memory_that_a_step_used_is_said(ended: Ended) -> None:
    """By sacct alone, with what was asked for; not of a step that ended before Slurm looked."""
    job, *steps = read_accounting(ended.numbers["memory"])
    found = str(summarize_job(read_job(job.job_id)))
    used = [each for each in steps if each.memory.strip("0KMGT.")]
    assert job.memory == "200M"
    assert found.count(" at most; asked for was 200M") == len(used)
    assert all(f"step {each.job_id} used {each.memory} at most" in found for each in used)


def test_only_the_last_start_of_a_requeued_job_counts(ended: Ended) -> None:
    """sacct has records of both, each with its steps."""
    number = ended.numbers["again"]
    job, *steps = read_accounting(number)
    assert (job.state, job.num_restarts, len(steps)) == ("FAILED", 1, 2)
    assert job.exitcode == 4


def test_tasks_of_a_forgotten_array_are_there(ended: Ended) -> None:
    """Each with its own number, in their order, and the exit status of `follow` is that of the one that failed."""
    number = ended.numbers["array"]
    records = read_jobs(number)
    assert [(each.job_id, each.state) for each in records] == [
        (f"{number}_{task}", "FAILED" if task == 1 else "COMPLETED") for task in range(4)
    ]
    assert len({each.number for each in records}) == 4
    done = ended.cluster.run(*DDPILOT, "follow", number, check=False)
    assert done.returncode == 3
    assert done.stderr.endswith(f"array {number}: 3 of 4 tasks completed; not: 1 (FAILED)\n")
    assert read_job(f"{number}_1").exitcode == 3


def test_values_of_a_forgotten_function_are_there(ended: Ended) -> None:
    """And its error, with the rank and the host."""
    added, refused = ended.functions
    assert list(added.result()) == [3, 3]
    with pytest.raises(RankError, match="bad sample 17") as caught:
        refused.result()
    assert caught.value.host in ("n1", "n2")


def test_a_number_that_was_never_given_is_unknown(ended: Ended) -> None:
    """To both."""
    assert os.environ["SLURM_CONF"] == ended.cluster.variables["SLURM_CONF"]
    with pytest.raises(SlurmError, match="Invalid job id specified"):
        read_job("4711")
