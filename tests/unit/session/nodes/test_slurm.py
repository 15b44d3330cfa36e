# SPDX-License-Identifier: Apache-2.0
"""What Slurm reports about the job of a session's nodes."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ddpilot.session.nodes.slurm import SlurmCluster, SlurmRequest


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
