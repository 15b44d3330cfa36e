# SPDX-License-Identifier: Apache-2.0
"""Job scripts, compared with whole files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddpilot.slurm.options import JobOptions
from ddpilot.slurm.script import render_job_script
from tests.unit.slurm.scripts import GOLDEN, OPTIONS, render


@pytest.mark.parametrize("name", OPTIONS)
def test_job_script_is_as_kept(name: str) -> None:
    """If it is meant to differ, `python -m tests.unit.slurm.scripts` writes the files again."""
    assert render(name) == (GOLDEN / f"{name}.sh").read_text()


def test_every_kept_script_is_compared() -> None:
    """No file is left of options that are gone."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(OPTIONS)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed here")
def test_job_scripts_are_clean_for_shellcheck() -> None:
    """All of them, with all of its checks that are on by default."""
    words = ["shellcheck", *map(str, sorted(GOLDEN.iterdir()))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", OPTIONS)
def test_job_script_leaves_gpu_numbers_alone_and_ends_all_ranks_with_one(name: str) -> None:
    """CUDA_VISIBLE_DEVICES is Slurm's; a rank that fails ends the step."""
    text = render(name)
    assert "CUDA_VISIBLE_DEVICES" not in text
    assert "srun --kill-on-bad-exit=1" in text


def test_module_is_run_by_name() -> None:
    """As `python -m` does."""
    assert "python -u -m package.train --epochs 1\n" in render_job_script(
        JobOptions(), "package.train", ["--epochs", "1"], module=True
    )


def test_page_shows_the_job_script_as_it_is() -> None:
    """docs/how_to/slurm.md has the script of its first command."""
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "slurm.md").read_text()
    shown = re.search(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    assert shown is not None
    assert shown[1] == render_job_script(
        JobOptions(nodes=2, gpus_per_node="2", time="10"), "train.py", ["--epochs", "2"]
    )
