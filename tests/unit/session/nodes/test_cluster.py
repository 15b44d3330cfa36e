# SPDX-License-Identifier: Apache-2.0
"""What Slurm reports about the job of a session's nodes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from ddpilot.session.nodes import cluster
from ddpilot.session.nodes.cluster import SlurmCluster, SlurmRequest


@pytest.mark.parametrize(
    ("shown", "end"),
    [
        ("JobState=RUNNING Reason=None ", ""),
        ("JobState=CANCELLED Reason=None ", "job 12 was cancelled"),
        ("JobState=COMPLETING Reason=TimeLimit ", "job 12 has reached its time limit"),
        ("JobState=TIMEOUT Reason=TimeLimit ", "job 12 has reached its time limit"),
        ("", ""),
    ],
)
def test_end_of_a_job_is_known_by_its_reason_before_its_state(
    monkeypatch: pytest.MonkeyPatch, shown: str, end: str
) -> None:
    """Slurm may take 30 s to end what runs at the time limit; until then the state of the job is COMPLETING."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess((), 0, f"JobId=12 JobName=x {shown}Requeue=1", "")
    monkeypatch.setattr(subprocess, "run", lambda *_words, **_options: done)
    assert SlurmCluster(SlurmRequest(), lambda _text: None).describe_job_end() == end


def test_no_command_line_has_the_key() -> None:
    """It is in the first line of standard input."""
    line = cluster.first_line(
        node_rank=None, num_nodes=2, directory="/work", port=4711, certificate="PEM", keys=["aa", "bb"]
    )
    given = json.loads(line)
    assert given["keys"] == ["aa", "bb"]
    assert given["addresses"][-1] == "127.0.0.1"
    words = [*cluster.srun_command(2, ["--jobid=7"]), *cluster.ssh_command("a")]
    assert not any("PEM" in word or "4711" in word for word in words)


def test_ssh_gets_one_word_for_the_remote_shell_and_no_option_from_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DDPILOT_SSH` names another ssh, with options."""
    monkeypatch.setenv("DDPILOT_SSH", "myssh -F 'my config'")
    *words, dashes, host, remote = cluster.ssh_command("a")
    assert words[:3] == ["myssh", "-F", "my config"]
    assert "BatchMode=yes" in words
    assert (dashes, host) == ("--", "a")
    assert remote.startswith("exec ")


def test_srun_starts_one_task_per_node() -> None:
    """As a step that shares the job's resources and outlives the failure of a node."""
    words = cluster.srun_command(3, ["--jobid=7"])
    assert words[:2] == ["srun", "--jobid=7"]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--overlap", "--no-kill"} <= {*words}


def test_slurm_options_become_words() -> None:
    """Those without a value too."""
    request = SlurmRequest(gpus_per_node=4, options={"time": "10", "exclusive": ""})
    assert request.words() == ["--gpus-per-node=4", "--time=10", "--exclusive"]
