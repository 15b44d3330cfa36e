# SPDX-License-Identifier: Apache-2.0
"""The user's `on_finding` is called in order, in a thread of its own."""

from __future__ import annotations

import threading

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.watch.calling import Caller, OnFinding
from ddpilot.watch.report import Report

LIMIT_S = 10.0


def report(*codes: str) -> Report:
    """One with a finding for each of `codes`."""
    made = [
        Finding(code=code, name="n", severity="error", summary="s", ranks=(0,), why="w", fix="f", source="x")
        for code in codes
    ]
    return Report(job="j", name="train", world_size=2, findings=Findings(made))


def called(on_finding: OnFinding) -> tuple[Caller, list[str], list[str]]:
    """A caller, what it says, and the codes of the reports that it stops for."""
    said: list[str] = []
    stopped: list[str] = []
    caller = Caller(on_finding, stop=lambda each: stopped.append(each.findings[0].code), say=said.append)
    return caller, said, stopped


def test_a_function_that_takes_long_holds_up_nobody() -> None:
    """What comes meanwhile is given to it afterwards, in order; nobody waits for longer than he says."""
    may_return = threading.Event()
    seen: list[str] = []

    def wait(finding: Finding) -> None:
        seen.append(finding.code)
        may_return.wait(LIMIT_S)

    caller, _, stopped = called(wait)
    caller.call(report("DDP201", "DDP204"))
    caller.call(report("DDP209"))
    caller.wait(0.01)
    assert seen == ["DDP201"]
    may_return.set()
    caller.wait(LIMIT_S)
    assert seen == ["DDP201", "DDP204", "DDP209"]
    assert stopped == []


def test_an_answer_stops_for_its_report_and_an_error_is_said() -> None:
    """Also where the function has raised for another finding of the same report."""

    def answer(finding: Finding) -> str:
        if finding.code == "DDP204":
            raise LookupError(finding.code)
        return "stop" if finding.code == "DDP209" else ""

    caller, said, stopped = called(answer)
    for codes in (("DDP201",), ("DDP204", "DDP209")):
        caller.call(report(*codes))
    caller.wait(LIMIT_S)
    assert stopped == ["DDP204"]
    assert said == ["`on_finding` raised LookupError: DDP204"]
