# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check` without an accelerator: its catalogue, skipped checks, report and exit status."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpilot.cli.app import app
from ddpilot.errors import DdpilotError
from ddpilot.gpu_check import runner
from ddpilot.gpu_check.catalogue import CHECKS, PAIR_ON_ONE_DEVICE, Check, Outcome, Status, choose_checks, find_check
from ddpilot.gpu_check.child import run_check
from ddpilot.gpu_check.runner import Result, why_not
from ddpilot.module_names import GPU_CHECKS


def facts(num: int, kind: str = "cuda") -> dict[str, Any]:
    """The facts of a machine with `num` devices."""
    cuda = "13.0" if kind == "cuda" else None
    return {"kind": kind if num else "cpu", "devices": [{"name": "GPU"}] * num, "cuda": cuda, "ddpilot": "1"}


def result_of(name: str, status: Status) -> Result:
    """A check that ended."""
    return Result(check=find_check(name), outcome=Outcome(status=status, evidence=""), seconds=1.0)


def test_each_check_has_a_function_with_its_name_and_a_claim() -> None:
    """The strings of the catalogue lead to functions, and no name is there twice."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        function = getattr(importlib.import_module(f"{GPU_CHECKS}.{check.module}"), check.name)
        assert function.__doc__
        assert check.claim


def test_names_choose_checks_in_the_order_of_the_catalogue() -> None:
    """Without names all of them; for a wrong one the error has the right one."""
    last, first = CHECKS[-1].name, CHECKS[0].name
    assert [check.name for check in choose_checks([last, first])] == [first, last]
    assert choose_checks([]) == CHECKS
    with pytest.raises(DdpilotError, match=r"no check 'hang_is_name'.*Did you mean hang_is_named"):
        choose_checks(["hang_is_name"])


@pytest.mark.parametrize(
    ("name", "num", "kind", "wanted"),
    [
        ("no_context_at_import", 1, "cuda", ""),
        ("no_context_at_import", 2, "xpu", "no NVIDIA device is visible"),
        ("no_context_at_import", 0, "cpu", "no NVIDIA device is visible"),
        ("memory_is_returned", 0, "cpu", "needs 1 device, none here"),
        ("checkpoint_of_two_devices", 1, "cuda", "needs 2 devices, 1 here"),
        ("hang_is_named", 0, "cpu", ""),
        ("hang_is_named", 1, "cuda", ""),
        ("hang_is_named", 1, "xpu", "needs 2 devices, 1 here"),
        ("hang_is_named", 2, "xpu", ""),
    ],
)
def test_why_not_names_what_the_machine_lacks(name: str, num: int, kind: str, wanted: str) -> None:
    """NVIDIA's driver, devices, or two of them; a pair also runs on one NVIDIA device and on the CPU."""
    assert why_not(find_check(name), facts(num, kind), []) == wanted


def test_a_pair_on_one_device_is_left_out_once_nccl_refused_it() -> None:
    """Then the checks that depend on it name the failed one; with two devices they run."""
    failed = [result_of(PAIR_ON_ONE_DEVICE, "failed")]
    assert PAIR_ON_ONE_DEVICE in why_not(find_check("hang_is_named"), facts(1), failed)
    assert why_not(find_check("hang_is_named"), facts(2), failed) == ""
    assert why_not(find_check("hang_is_named"), facts(1), [result_of(PAIR_ON_ONE_DEVICE, "ok")]) == ""


def test_missing_packages_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions need ipykernel."""
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert why_not(find_check("session_of_one_continues"), facts(1), []) == (
        "ipykernel and jupyter_client not installed: pip install 'ddpilot[notebook]'"
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Lets children answer without a process: a value by name."""

    def answer(values: dict[str, Any]) -> None:
        def run_child(name: str, limit_s: float) -> runner._Ended:
            value = facts(1) | {"torch": "2.13.0", "python": "3.11"} if name == "facts" else values.get(name)
            why = "" if value else f"no answer in {limit_s:.0f} s"
            return runner._Ended(value=value, why=why, seconds=2.0, output="one\nlast words\n")

        monkeypatch.setattr(runner, "_run_child", run_child)

    return answer


def test_report_has_versions_devices_and_each_check(
    answers: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and the file distinguish ok, FAILED and cannot be shown; a FAILED check gives exit status 1."""
    answers({"group_of_one": {"status": "ok", "evidence": "nccl"}})
    path = tmp_path / "report.json"
    names = ["group_of_one", "loop_has_the_cpus_numbers", "checkpoint_of_two_devices"]
    done = CliRunner().invoke(app, ["gpu-check", *names, "--json", str(path), "--time-limit-s", "7"])
    assert done.exit_code == 1
    lines = [line.split(maxsplit=4) for line in done.stdout.splitlines()[1:4]]
    assert [line[0] for line in lines] == ["ok", "FAILED", "-"]
    assert lines[1][4] == "no answer in 7 s: last words"
    assert "1 ok, 1 FAILED, 1 cannot be shown here" in done.stdout
    report = json.loads(path.read_text())
    assert report["counts"] == {"ok": 1, "failed": 1, "cannot be shown": 1}
    assert [check["name"] for check in report["checks"]] == names
    assert report["checks"][1]["output"].endswith("last words\n")
    assert (report["torch"], report["devices"]) == ("2.13.0", [{"name": "GPU"}])


def test_only_ok_and_cannot_be_shown_make_status_0(answers: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    """What this machine cannot show is no failure."""
    answers({"group_of_one": {"status": "ok", "evidence": "nccl"}})
    words = ["gpu-check", "group_of_one", "checkpoint_of_two_devices", "--json", str(tmp_path / "report.json")]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["no_such_check"], "no check 'no_such_check'"),
        (["--time-limit-s", "0"], "reading --time-limit-s: 0"),
        (["group_of_one", "--json", "no/such/folder/x.json"], "no/such/folder/x.json: No such file or directory"),
    ],
)
def test_bad_use_is_refused_before_a_check_runs(
    answers: Callable[[dict[str, Any]], None], words: list[str], wanted: str
) -> None:
    """An error of ddpilot, which `main` turns into status 2."""
    answers({})
    error = CliRunner().invoke(app, ["gpu-check", *words]).exception
    assert isinstance(error, DdpilotError)
    assert wanted in str(error)


def test_list_shows_each_check_with_what_it_needs() -> None:
    """A line for each."""
    lines = CliRunner().invoke(app, ["gpu-check", "--list"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [check.name for check in CHECKS]


def test_an_exception_of_a_check_is_a_failure_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a CannotBeShownError is not."""
    from ddpilot.gpu_check.catalogue import CannotBeShownError
    from ddpilot.gpu_check.checks import groups

    def fail(error: Exception) -> Callable[[], Outcome]:
        def check() -> Outcome:
            raise error

        return check

    monkeypatch.setattr(groups, "group_of_one", fail(ValueError("boom")))
    outcome = run_check("group_of_one")
    assert outcome.status == "failed"
    assert outcome.evidence.startswith("ValueError at test_gpu_check.py:")
    monkeypatch.setattr(groups, "group_of_one", fail(CannotBeShownError("nothing here")))
    assert run_check("group_of_one") == Outcome(status="cannot be shown", evidence="nothing here")


def test_a_check_that_does_not_answer_is_ended() -> None:
    """At its limit, in a process group of its own."""
    ended = runner._run_child("group_of_one", 0.01)
    assert (ended.value, ended.why) == (None, "timed out after 0.01 s (--time-limit-s)")


def test_no_check_waits_longer_for_its_ranks_than_for_itself() -> None:
    """So that a launch that hangs fails with the stacks of its ranks."""
    from ddpilot.gpu_check.checks.accelerator import LAUNCH_LIMIT_S

    assert min(check.limit_s for check in CHECKS) > LAUNCH_LIMIT_S
    assert all(isinstance(check, Check) for check in CHECKS)


def test_evidence_of_a_time_out_is_where_the_main_thread_was() -> None:
    """faulthandler writes the innermost frame first, and the main thread last."""
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "selectors.py", line 468 in select\n\n'
        'Thread 0x2 (most recent call first):\n  File "train.py", line 5 in wait\n  File "run.py", line 9 in main\n'
    )
    assert runner._last_line(f"starting\n{stacks}") == 'File "train.py", line 5 in wait'
    assert runner._last_line(f"{stacks}RuntimeError: lost") == "RuntimeError: lost"
    assert runner._last_line("") == "no output"
