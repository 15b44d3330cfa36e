# SPDX-License-Identifier: Apache-2.0
"""`ddpilot lint` as a user runs it: exit statuses, output, fixes; and flake8 with the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpilot.cli.app import app
from ddpilot.cli.lint_command import lint

FAULTY = """from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(d, shuffle=True, sampler=DistributedSampler(d))
"""
FIXED = FAULTY.replace("shuffle=True, ", "")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script with one fault, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FAULTY)
    return tmp_path / "train.py"


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of ``ddpilot lint``."""
    result = CliRunner().invoke(app, ["lint", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_lint_prints_one_line_for_each_report_and_exits_with_1(script: Path) -> None:
    """0 if there is nothing to report."""
    status, output = run("train.py")
    assert (status, output.count("\n")) == (1, 1)
    assert output.startswith("train.py:2:10 DDP413 ")
    assert run(".", "--ignore", "ddp413") == (0, "")
    assert run("train.py", "--select", "DDP1,DDP2") == (0, "")
    assert json.loads(run("train.py", "--format", "json")[1])[0]["fixable"]


def test_lint_says_how_many_files_it_checked_if_there_is_nothing_to_report(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, so that the output holds reports only."""
    assert lint(["train.py"]) == 1
    assert capsys.readouterr().err == ""
    script.write_text(FIXED)
    assert lint(["train.py"]) == 0
    assert capsys.readouterr() == ("", "1 file checked, nothing to report\n")
    assert lint(["train.py"], output_format="json") == 0
    assert capsys.readouterr().err == ""
    script.unlink()
    assert lint(["."]) == 0
    assert capsys.readouterr() == ("", "no Python file or notebook found\n")


@pytest.mark.parametrize("start", ["import torch", "import json"], ids=["torch", "without torch"])
def test_a_file_that_cannot_be_parsed_is_no_success_if_it_is_named(script: Path, start: str) -> None:
    """In a folder it is passed over."""
    (script.parent / "old.py").write_text(f"{start}\nprint 1\n")
    script.unlink()
    assert run("old.py")[0] == 2
    assert run(".")[0] == 0


def test_lint_reads_options_of_pyproject(script: Path) -> None:
    """An option of the command replaces that of the file."""
    script.with_name("pyproject.toml").write_text('[tool.ddpilot.lint]\nignore = ["DDP413"]\n')
    assert run("train.py") == (0, "")
    assert run("train.py", "--ignore", "DDP330")[0] == 1


@pytest.mark.parametrize("arguments", [("none.py",), ("train.py", "--select", "X1"), ("train.py", "--format", "xml")])
def test_lint_exits_with_2_for_a_wrong_call(script: Path, arguments: tuple[str, ...]) -> None:
    """The message names what was given."""
    command = [sys.executable, "-m", "ddpilot", "lint", *arguments]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_diff_prints_and_fix_writes(script: Path) -> None:
    """Both print the same diff; the file changes only by `--fix`, which then reports what is left."""
    status, shown = run("train.py", "--diff")
    assert (status, script.read_text()) == (1, FAULTY)
    assert "-loader = DataLoader(d, shuffle=True, " in shown
    assert run("train.py", "--fix") == (0, shown)
    assert script.read_text() == FIXED
    assert run("train.py", "--diff") == (0, "")


def test_flake8_runs_the_rules(script: Path) -> None:
    """The entry point is found, and flake8's own comment is obeyed."""
    pytest.importorskip("flake8")
    command = [sys.executable, "-m", "flake8", "--isolated", "--select", "DDP", "train.py"]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("train.py:2:10: DDP413 "), done.stderr
    script.write_text(FAULTY.replace("(d))\n", "(d))  # noqa: DDP413\n"))
    assert subprocess.run(command, cwd=script.parent, capture_output=True, timeout=60).returncode == 0
