# SPDX-License-Identifier: Apache-2.0
"""`ddpilot slurm` on a real Slurm: follow from any state, leave with Ctrl-C, cancel, and the reason of the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import DDPILOT, PYTHON, following

SLEEP = "import time; print('sleeping', flush=True); time.sleep(300)\n"
FAIL = """
import os, time
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "2":
    raise ValueError("bad sample 17")
time.sleep(300)
"""


def test_follow_names_the_rank_that_failed_first(cluster: Cluster, tmp_path: Path) -> None:
    """The output comes while it runs, and the end has the error of rank 2; the exit status is the job's."""
    with following(cluster, tmp_path, FAIL, "--nodes=2", "--nproc-per-node=2", "--launcher=python") as followed:
        assert followed.wait() in (1, 143)  # srun's is the highest of all tasks, those that it ended included
    assert "0: rank 0\n" in followed.out
    assert re.search(r"job \d+ ended after \S+ \(FAILED\): exit code 1\b", followed.err)
    assert "first error in the output: task 2: ValueError: bad sample 17" in followed.err
    assert "task 2 on n2: exited with exit code 1" in followed.err


def test_follow_says_why_a_job_is_pending_and_leaves_it_at_ctrl_c(cluster: Cluster, tmp_path: Path) -> None:
    """A pending job is shown with reason and estimated start, stays after Ctrl-C, and is cancelled by its number."""
    with following(cluster, tmp_path, SLEEP, "--nodes=4", "--exclusive", "--time=5") as first:
        first.wait_for("sleeping")
        with following(cluster, tmp_path, SLEEP, "--nodes=4", "--exclusive", "--time=5") as second:
            second.wait_for(r"is pending: Resources \(it waits for nodes to be free\), expected to start at 20\d\d-")
            job_id = second.job_id
            second.process.send_signal(signal.SIGINT)
            assert second.wait() == 130
            assert f"job {job_id} was not cancelled: `ddpilot slurm follow {job_id}` follows it again" in second.err
            assert cluster.state(job_id) == "PENDING"
            status = cluster.run(*DDPILOT, "status", job_id)
            assert f"job {job_id} is pending: Resources" in status.stdout
            assert cluster.run(*DDPILOT, "cancel", job_id).stdout == f"job {job_id} is cancelled\n"
            assert "(CANCELLED): it was cancelled" in cluster.run(*DDPILOT, "status", job_id).stdout
        cluster.run(*DDPILOT, "cancel", first.job_id)
        assert first.wait() != 0
    assert re.search(r"job \d+ is running on n\[1-4\] since 20\S+, time limit 00:05:00", first.err)
    assert "(CANCELLED): it was cancelled" in first.err


def test_follow_takes_up_a_job_that_is_over(cluster: Cluster, tmp_path: Path) -> None:
    """By number alone, from anywhere: its whole output and its end."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = cluster.run(*DDPILOT, "train.py", *PYTHON, "--no-follow", cwd=tmp_path)
    found = re.search(r"submitted job (\d+)", done.stderr)
    assert found is not None
    assert cluster.wait_for(found[1], ("COMPLETED", "FAILED")) == "COMPLETED"
    done = cluster.run(*DDPILOT, "follow", found[1])
    assert done.stdout == "hello\n"
    assert f"job {found[1]} completed after" in done.stderr


ARRAY = """
import os
print("task", os.environ["SLURM_ARRAY_TASK_ID"], flush=True)
if os.environ["SLURM_ARRAY_TASK_ID"] == "1":
    raise ValueError("bad sample 17")
"""


def test_all_tasks_of_an_array_are_followed(cluster: Cluster, tmp_path: Path) -> None:
    """The output of each with its number, the end of each, and the exit status of the one that failed."""
    with following(cluster, tmp_path, ARRAY, "--array=0-2", "--time=5") as followed:
        assert followed.wait() == 1
    number = followed.job_id
    assert all(f"{task}: task {task}\n" in followed.out for task in range(3))
    assert f"job {number}_2 completed after" in followed.err
    assert re.search(
        rf"job {number}_1 ended after \S+ \(FAILED\): exit code 1\n.*ValueError: bad sample 17", followed.err
    )
    assert followed.err.endswith(f"array {number}: 2 of 3 tasks completed; not: 1 (FAILED)\n")
    one = cluster.run(*DDPILOT, "follow", f"{number}_0")
    assert one.stdout == "task 0\n"
    status = cluster.run(*DDPILOT, "status", number).stdout
    assert status.startswith(f"array {number}: 2 of 3 tasks completed; not: 1 (FAILED)\njob {number}_1 ended")


def test_one_task_of_an_array_is_cancelled_and_the_others_wait(cluster: Cluster, tmp_path: Path) -> None:
    """By its number with the array's; the array's number alone cancels all of them."""
    (tmp_path / "train.py").write_text(SLEEP)
    words = ("train.py", *PYTHON, "--array=0-3%2", "--time=5", "--no-follow")
    number = cluster.run(*DDPILOT, *words, cwd=tmp_path).stderr.split()[-1]
    for task in (0, 1):
        cluster.wait_for(f"{number}_{task}", ("RUNNING",))
    assert f"array {number}: tasks 0, 1 run, tasks 2" in cluster.run(*DDPILOT, "status", number).stdout
    assert f"job {number}_3 is pending: JobArrayTaskLimit" in cluster.run(*DDPILOT, "status", f"{number}_3").stdout
    assert cluster.run(*DDPILOT, "cancel", f"{number}_0").stdout == f"job {number}_0 is cancelled\n"
    cluster.wait_for(f"{number}_2", ("RUNNING",))
    assert cluster.run(*DDPILOT, "cancel", number).stdout == f"job {number} is cancelled\n"
    cluster.wait_for(f"{number}_1", ("CANCELLED",))
    assert f"array {number}: 0 of 4 tasks completed" in cluster.run(*DDPILOT, "status", number).stdout


def test_standard_error_in_a_file_of_its_own_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    """And names of files may have the node's name in them."""
    words = ("--output=%x-%N.out", "--error=%x-%N.err", "--time=5")
    with following(cluster, tmp_path, "print('hello')\nraise ValueError('bad sample 17')\n", *words) as followed:
        assert followed.wait() == 1
    assert "hello\n" in followed.out
    assert "first error in the output: ValueError: bad sample 17" in followed.err
    assert "bad sample 17" in cluster.run(*DDPILOT, "status", followed.job_id).stdout


def test_output_that_cannot_be_opened_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm reports a signal that nobody has sent."""
    with following(cluster, tmp_path, "print('hello')\n", f"--output={tmp_path}/none/%j.out", "--time=5") as followed:
        assert followed.wait() != 0
    assert f"its output file could not be opened on the node: {tmp_path}/none/{followed.job_id}.out" in followed.err


def test_end_names_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """A job that is still running at its limit."""
    with following(cluster, tmp_path, SLEEP, "--time=1") as followed:
        followed.wait_for("sleeping")
        cluster.run("scontrol", "update", f"JobId={followed.job_id}", "EndTime=now+2")
        assert followed.wait(limit_s=100) != 0
    assert re.search(r"\(TIMEOUT\): its time limit of \S+ was reached\n", followed.err)
    assert "what to do: ask for more with `--time`" in followed.err


def test_end_names_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    """A node without power, while the job may not be requeued."""
    with following(cluster, tmp_path, SLEEP, "--nodes=2", "--no-requeue") as followed:
        followed.wait_for("1: sleeping")
        cluster.kill_node("n2")
        assert followed.wait(limit_s=100) != 0
    assert "(NODE_FAIL): node n2 failed (Not responding)\n" in followed.err
    assert "Node failure on n2" in followed.err


def test_end_names_preemption(cluster: Cluster, tmp_path: Path) -> None:
    """A job of a partition with priority takes its nodes."""
    with following(cluster, tmp_path, SLEEP, "--nodes=4", "--exclusive", "--partition=low", "--no-requeue") as followed:
        followed.wait_for("3: sleeping")
        cluster.run("sbatch", "--partition=urgent", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap", "true")
        assert followed.wait(limit_s=100) != 0
    assert "PREEMPTED): a job of higher priority took its nodes\n" in followed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition=nowhere",), "invalid partition specified: nowhere"),
        (("--gpus-per-node=9",), "Requested node configuration is not available"),
        (("--time=soon",), "`time` is 'soon'"),
        (("--output=logs/%j.out",), "`output`: there is no folder logs"),
        (("--gpu-per-node=4",), "Did you mean --gpus-per-node?"),
    ],
)
def test_refusals_are_said_and_nothing_is_submitted(
    cluster: Cluster, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """Ours come before sbatch is called, and those of sbatch in its own words."""
    (tmp_path / "train.py").write_text(SLEEP)
    done = cluster.run(*DDPILOT, "train.py", *words, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_unknown_job_is_said(cluster: Cluster) -> None:
    """In Slurm's words and with what to do."""
    done = cluster.run(*DDPILOT, "status", "999999", check=False)
    assert done.returncode == 2
    assert "Invalid job id specified" in done.stderr


WATCHED = """
import time
import torch
import torch.distributed as dist
import ddpilot
with ddpilot.init_group("gloo") as group:
    dist.barrier()
    print("met", flush=True)
    if group.rank == 1:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))
"""


def test_status_has_the_ranks_from_the_watch_of_each_node(cluster: Cluster, tmp_path: Path) -> None:
    """A rank that never came to a collective is named while the job runs, by the node that sees it."""
    words = ("--nodes=2", "--launcher=ddpilot", "--time=5")
    with following(cluster, tmp_path, WATCHED, *words) as followed:
        followed.wait_for("met")
        cluster.run(*DDPILOT, "status", followed.job_id)
        status = cluster.run(*DDPILOT, "status", followed.job_id).stdout
        cluster.run(*DDPILOT, "cancel", followed.job_id)
        followed.wait()
    assert "is running on n[1-2]" in status
    assert "  n1: train.py on 2 ranks" in status
    assert "  n2: train.py on 2 ranks" in status
    assert "all_reduce" in status


def test_status_says_that_ranks_are_not_watched(cluster: Cluster, tmp_path: Path) -> None:
    """And how to have them watched."""
    with following(cluster, tmp_path, SLEEP, "--time=5") as followed:
        followed.wait_for("sleeping")
        status = cluster.run(*DDPILOT, "status", followed.job_id).stdout
        cluster.run(*DDPILOT, "cancel", followed.job_id)
        followed.wait()
    assert "  ranks: not watched; submit with `--env DDPILOT_WATCH=1`" in status
