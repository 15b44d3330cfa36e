# SPDX-License-Identifier: Apache-2.0
"""Calls of Slurm's commands, without Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.errors import SlurmError
from ddpilot.slurm.commands import leave_job, read_job, submit_job


def test_variables_of_an_outer_job_do_not_reach_the_new_one() -> None:
    """As where a notebook on a compute node submits a job; which Slurm it is stays known."""
    environ = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4", "SRUN_CPUS_PER_TASK": "2", "SBATCH_QOS": "a"}
    assert leave_job(environ) == {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "a"}


def test_missing_slurm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With where to run it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="no command sbatch: Slurm is not installed here"):
        submit_job("#!/bin/bash\n", folder=tmp_path)


def test_what_is_not_the_number_of_a_job_is_refused() -> None:
    """Before Slurm is asked."""
    with pytest.raises(SlurmError, match="'train' is not the number of a job"):
        read_job("train")
