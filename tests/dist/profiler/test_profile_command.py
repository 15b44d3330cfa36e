# SPDX-License-Identifier: Apache-2.0
"""`ddpilot profile` on a script with one planted cost: the first finding names it, with rank and line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forked import start_forked
from tests.dist.in_process import Run, run_command

__all__ = ["run_command"]

SCRIPT = Path(__file__).with_name("train.py")


def profile(run_command: Run, planted: str) -> dict[str, Any]:
    """The profile, as JSON, of the script with a planted cost on two ranks."""
    done = run_command("profile", SCRIPT, "-n", 2, "--json", "--", planted)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def mean_ms(found: dict[str, Any], share: str) -> list[float]:
    """The mean of a phase by rank."""
    place = found["shares"].index(share)
    return [1e3 * sum(update[place] for update in updates) / len(updates) for updates in found["seconds"]]


_PLANTED = [
    ("logging", "DDP724", [], "a line takes"),
    ("loader of rank 1", "DDP722", [1], "in loading data"),
    ("loader", "DDP721", [], "waits"),
    ("forward of rank 1", "DDP722", [1], "in the forward pass"),
    ("code of rank 1", "DDP722", [1], "in code between these phases"),
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("planted", "code", "ranks", "words"), _PLANTED if os.environ.get("DDPILOT_SOAK") else _PLANTED[:1]
)
def test_the_first_finding_names_the_planted_cost(
    planted: str, code: str, ranks: list[int], words: str, run_command: Run
) -> None:
    """Its rank, its phase, its line."""
    found = profile(run_command, planted)
    first = found["findings"][0]
    assert (first["code"], first["ranks"]) == (code, ranks), found["findings"]
    assert words in first["summary"]
    if planted == "logging":
        assert "THE LINE" in first["place"]["text"]
    if planted == "loader of rank 1":
        assert mean_ms(found, "data")[1] > 19
        assert mean_ms(found, "waiting")[0] > 10
    phases = [sum(update) for update in found["seconds"][0]]
    assert all(seconds > 0 for seconds in phases)


def test_the_script_runs_as_it_is_and_a_report_is_written(tmp_path: Path, run_command: Run) -> None:
    """Its output is shown, then the table, the bars and where the report is."""
    path, traces = tmp_path / "profile.html", tmp_path / "traces"
    window = ("--trace", traces, "--trace-window", "3,1,3,2", "--trace-memory", "--nvtx")
    done = run_command("profile", SCRIPT, "-n", 2, "--html", path, *window, "--", "forward")
    assert done.returncode == 0, done.stderr
    assert "[rank 0] loss " in done.stdout
    assert "F forward" in done.stdout
    said = f"report: {path}\ntrace: {traces / 'trace.json.gz'} (recorded updates took "
    assert said in done.stdout
    written = {"trace_rank_0.json.gz", "trace_rank_0_2.json.gz", "trace_rank_1.json.gz", "trace_rank_1_2.json.gz"}
    assert {each.name for each in traces.iterdir()} == {"trace.json.gz", *written}
    if not torch.cuda.is_available():
        assert "[rank 0] ddpilot: --nvtx: there is no CUDA device" in done.stdout + done.stderr
    assert "<svg" in path.read_text("utf-8")


def test_scaling_is_compared(run_command: Run) -> None:
    """Each number of ranks has a row; a sleep in the forward pass is shared by no two ranks."""
    done = run_command("scale", SCRIPT, "-n", "1,2", "--rounds", 1, "--json", "--", "forward")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["num_ranks"] for row in found["rows"]] == [1, 2]
    assert found["kind"] == "weak"
    assert found["rows"][1]["speed_up"] > 1.05  # 1 or less if the ranks slept one after the other
    assert [row["num_ranks"] for row in found["predicted"]] == [4]
    assert found["held_out"]["num_ranks"] == 2
    assert "1 bucket of 0.0686 MB" in found["notes"][0], found["notes"]


def test_what_cannot_be_profiled_is_refused(tmp_path: Path, run_command: Run) -> None:
    """A missing script, a missing folder, a script without updates, one that fails."""

    def refusal(*words: object) -> str:
        done = run_command("profile", *words)
        assert done.returncode == 2
        return done.stderr

    assert "missing.py" in refusal("missing.py")
    said = refusal(SCRIPT, "--html", tmp_path / "none" / "a.html", "--", "loader")
    assert "there is no folder for" in said
    said = refusal(SCRIPT, "--html", tmp_path, "--", "loader")
    assert "cannot be written: Is a directory" in said
    assert "traces cannot be written to" in refusal(SCRIPT, "--trace", SCRIPT, "--", "loader")
    assert "given without --trace" in refusal(SCRIPT, "--trace-memory", "--", "loader")
    empty = tmp_path / "empty.py"
    empty.write_text("import torch\nprint('nothing')\n")
    assert "too few updates" in refusal(empty, "-n", 1)
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('broken')\n")
    done = run_command("profile", broken, "-n", 1)
    assert done.returncode != 0
    assert "ValueError: broken" in done.stderr


def test_a_script_that_fails_is_profiled_up_to_then(tmp_path: Path, run_command: Run) -> None:
    """The error is reported after the profile, and the report is written."""
    path = tmp_path / "profile.html"
    done = run_command("profile", SCRIPT, "-n", 1, "--json", "--html", path, "--", "error")
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)
    assert len(found["seconds"][0]) >= 15
    assert "planted" in found["ended_early"]
    assert "ValueError: planted" in done.stderr
    assert "<svg" in path.read_text("utf-8")


def test_ctrl_c_ends_the_script_and_prints_its_profile() -> None:
    """As it ends `tune`: with what is known so far, and the same exit status."""
    command = [sys.executable, "-m", "ddpilot", "profile", str(SCRIPT), "-n", "1", "--", "interrupt"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with start_forked(command, environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        while "update 20" not in (line := process.stdout.readline()):
            assert line, "the script has ended before"
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "F forward" in shown
    assert "the profile has the updates until then" in errors
