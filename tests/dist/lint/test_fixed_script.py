# SPDX-License-Identifier: Apache-2.0
"""Programs that `ddpilot lint --fix` has changed train on two ranks: one with all faults, and one for each fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.lint.fixes import fix_text
from ddpilot.lint.linter import LintOptions, lint_text
from ddpilot.lint.rules import RULES
from tests.dist.launching.scripts import Outcome
from tests.dist.run import commands
from tests.soak import soak

FAULTY = Path(__file__).with_name("faulty.py")
FIXABLE = FAULTY.with_name("fixable")
RUNNER = FAULTY.with_name("run_fixed.py")
FIXED_CODES = ["DDP331", "DDP336", "DDP402", "DDP413", "DDP502", "DDP602", "DDP609"]


def run(folder: Path, script: Path, *arguments: str) -> Outcome:
    """Run a script on two ranks to its end."""
    words = ["--standalone", "--nproc-per-node", 2, script, *arguments]
    return commands.run(folder, *words, CHECKPOINT=str(folder / f"{script.stem}.pt"))


@pytest.mark.timeout(240)
@soak
def test_fixed_script_trains_on_two_ranks(tmp_path: Path) -> None:
    """All seven kinds of faults are found and fixed, and both ranks train, save and load."""
    text = FAULTY.read_text()
    assert sorted(each.code for each in lint_text(text, "faulty.py")) == FIXED_CODES
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(text)
    after.write_text(fix_text(text, "faulty.py", LintOptions()))
    assert lint_text(after.read_text(), "after.py") == []
    assert "sampler option is mutually exclusive with shuffle" in (failed := run(tmp_path, before)).out + failed.err
    trained = run(tmp_path, after)
    assert trained.code == 0, trained.out + trained.err
    assert [f"rank {rank} trained: True" in trained.out for rank in (0, 1)] == [True, True]


@pytest.mark.timeout(240)
def test_the_program_of_each_fix_lints_clean_and_trains_on_two_ranks(tmp_path: Path) -> None:
    """One program for every rule with a fix, named by its code, and a notebook with three of them."""
    programs = sorted(each for each in FIXABLE.iterdir() if each.is_file())
    assert [each.stem for each in programs if each.suffix == ".py"] == sorted(e.code for e in RULES if e.is_fixable)
    for program in programs:
        text = program.read_text()
        codes = {each.code for each in lint_text(text, program.name)}
        assert codes == ({program.stem} if program.suffix == ".py" else {"DDP331", "DDP402", "DDP413"}), program
        (tmp_path / program.name).write_text(fix_text(text, program.name, LintOptions()))
        assert lint_text((tmp_path / program.name).read_text(), program.name) == []
    trained = run(tmp_path, RUNNER, str(tmp_path))
    assert trained.code == 0, trained.out + trained.err
    wanted = [f"rank {rank}: {each.name} trains: True" for rank in (0, 1) for each in programs]
    assert [line for line in wanted if line not in trained.out] == [], trained.out
