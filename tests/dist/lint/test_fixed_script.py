# SPDX-License-Identifier: Apache-2.0
"""A script that `ddpilot lint --fix` has changed runs on two ranks, and did not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpilot.lint.fixes import fix_text
from ddpilot.lint.linter import lint_text
from ddpilot.lint.options import LintOptions

FAULTY = Path(__file__).with_name("faulty.py")
FIXED_CODES = ["DDP331", "DDP336", "DDP402", "DDP413", "DDP502", "DDP602", "DDP609"]


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks to its end."""
    command = [sys.executable, "-m", "ddpilot", "run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "CHECKPOINT": str(script.with_suffix(".pt"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.timeout(240)
def test_fixed_script_trains_on_two_ranks(tmp_path: Path) -> None:
    """All seven kinds of faults are found and fixed, and both ranks train, save and load."""
    text = FAULTY.read_text()
    assert sorted(each.code for each in lint_text(text, "faulty.py")) == FIXED_CODES
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(text)
    after.write_text(fix_text(text, "faulty.py", LintOptions()))
    assert lint_text(after.read_text(), "after.py") == []
    assert "sampler option is mutually exclusive with shuffle" in (failed := run(before)).stdout + failed.stderr
    trained = run(after)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert [f"rank {rank} trained: True" in trained.stdout for rank in (0, 1)] == [True, True]
