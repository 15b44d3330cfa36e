# SPDX-License-Identifier: Apache-2.0
"""`ddpilot doctor`: options, output and exit status. Real checks are in tests/unit/diagnose and tests/dist/diagnose."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpilot.cli import doctor_command
from ddpilot.cli.app import app
from ddpilot.diagnose.diagnosis import Diagnosis, Line
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding

GOOD = Diagnosis("doctor: vm", (Line("host_name", "network", "vm is 10.0.0.1"),))
BAD = replace(GOOD, lines=(*GOOD.lines, Line("master_port", "network", make_finding("DDP103"))))


def run(monkeypatch: pytest.MonkeyPatch, found: Diagnosis, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output, and the options with which `doctor` was called."""
    given: dict[str, Any] = {}

    def doctor(**options: Any) -> Diagnosis:
        given.update(options)
        return found

    monkeypatch.setattr(doctor_command, "doctor", doctor)
    done = CliRunner().invoke(app, ["doctor", *words])
    return done.exit_code, done.output, given


def test_status_is_1_for_an_error_and_0_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of the diagnosis."""
    status, text, given = run(monkeypatch, GOOD)
    assert (status, text) == (0, f"{GOOD}\n")
    assert given["nproc_per_node"] is None
    assert given["live"] is True
    assert run(monkeypatch, BAD)[0] == 1


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of the function has one of the command."""
    words = ["-n", "3", "--workers", "4", "--no-live", "--nodes", "--timeout-s", "5", "--checkpoint-dir", "runs"]
    given = run(monkeypatch, GOOD, *words, "train.py")[2]
    assert str(given.pop("checkpoint_dir")) == "runs"
    assert str(given.pop("script")) == "train.py"
    assert given == {"nproc_per_node": 3, "num_workers": 4, "live": False, "nodes": True, "timeout_s": 5.0, "reach": ()}


def test_json_and_verbose_have_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON object; every line in full."""
    assert json.loads(run(monkeypatch, BAD, "--json")[1]) == BAD.to_dict()
    long = replace(GOOD, lines=(Line("interfaces", "network", "x" * 500),))
    assert "x" * 500 in run(monkeypatch, long, "-v")[1]


def test_a_rank_for_which_rank_0_speaks_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has status 0, so that a launcher reports one failed rank."""
    assert run(monkeypatch, replace(BAD, is_shown=False), "--nodes")[:2] == (0, "")


def test_wrong_options_have_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is checked."""
    assert run(monkeypatch, GOOD, "--workers", "-1")[0] == 2
    assert run(monkeypatch, GOOD, "--unknown")[0] == 2


def test_nodes_are_checked_in_a_job_only() -> None:
    """Outside of one, the error says how to start it on all nodes."""
    with pytest.raises(LaunchError, match="not a rank of a job.* `srun ddpilot doctor --nodes`"):
        CliRunner().invoke(app, ["doctor", "--nodes"], catch_exceptions=False)
