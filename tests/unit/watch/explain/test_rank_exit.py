# SPDX-License-Identifier: Apache-2.0
"""Who had not come when others gave up, and who closed a connection and ran on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.explain.rank_exit import find_cause_of_end
from ddpilot.watch.snapshot.model import ProcessState, PythonStack, RankException, RankSnapshot
from tests.unit.watch.logs import FILE, S, Writer, alive, died, group_of, job, returned

TIME_IS_UP = "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
CLOSED = "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37297"
SLEEPS = PythonStack(taken_ns=104 * S, frames=(CodeLine(FILE, 3, "main", "time.sleep(15)"),))


def ranks(message: str) -> tuple[RankSnapshot, Writer]:
    """Rank 0 was in a barrier and raised; rank 1 has not come to it."""
    zero, one = (Writer(rank, group_of(0, 1)).call("all_reduce", 1) for rank in (0, 1))
    process = ProcessState(pid=4000, state="ended", exitcode=1, ended_ns=105 * S)
    seen = alive(zero.wait("barrier", 9, state="failed"), process=process)
    return replace(seen, error=RankException(type_name="RuntimeError", message=message)), one


def found(analysis: Analysis) -> list[tuple[str, str, tuple[int, ...]]]:
    """Codes, severities and ranks."""
    return [(finding.code, finding.severity, finding.ranks) for finding in analysis.findings]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_timeout_names_who_had_not_come_and_its_line(is_stopped: bool) -> None:
    """Also once whoever started the ranks has stopped that one."""
    zero, one = ranks(TIME_IS_UP)
    late = replace(died(one, "SIGTERM", -15, 106 * S), stack=SLEEPS) if is_stopped else alive(one, stack=SLEEPS)
    analysis = analyze(job([zero, late]))
    assert found(analysis) == [("DDP218", "error", (1,))]
    (finding,) = analysis.findings
    assert "train.py:3  time.sleep(15)" in "\n".join(finding.evidence)
    assert "`timeout` expired before rank 1 called it" in finding.why


def test_a_connection_that_a_rank_closed_which_ran_on_is_a_teardown() -> None:
    """It was stopped after the other one had failed, so that it did not die of itself."""
    zero, one = ranks(CLOSED)
    analysis = analyze(job([zero, died(one, "SIGTERM", -15, 106 * S)]))
    assert found(analysis) == [("DDP216", "error", (1,))]
    assert "its last was #0" in "\n".join(analysis.findings[0].evidence)


@pytest.mark.parametrize(
    ("signal_name", "ended_s"), [("SIGKILL", 104), ("SIGTERM", 104)], ids=["out of memory", "preempted"]
)
def test_a_rank_that_ended_first_is_the_cause(signal_name: str, ended_s: int) -> None:
    """A signal from elsewhere, of which the connection is the consequence."""
    zero, one = ranks(CLOSED)
    analysis = analyze(job([zero, died(one, signal_name, -9, ended_s * S)]))
    assert found(analysis) == [("DDP209", "error", (1,))]


def test_a_rank_that_has_returned_has_not_run_on() -> None:
    """It came to its end without the barrier."""
    zero, one = ranks(CLOSED)
    assert found(analyze(job([zero, returned(one)]))) == [("DDP208", "error", (1,))]


@pytest.mark.parametrize(("closed_s", "after_s", "code"), [(None, 5.5, None), (105, 9.0, None), (None, 9.0, "DDP216")])
def test_a_rank_that_may_be_ending_has_not_run_on(closed_s: int | None, after_s: float, code: str | None) -> None:
    """Its connections go before its process does; its recording is closed before them."""
    zero, one = ranks(CLOSED)
    ending = alive(one, log=one.log(closed_ns=None if closed_s is None else closed_s * S))
    codes = [finding.code for finding in analyze(job([zero, ending], after_s=after_s)).findings]
    assert codes == ([code] if code else [])


def finding(code: str, severity: Literal["error", "warning"] = "error", rank: int = 0) -> Finding:
    """One with this code, about `rank`."""
    return Finding(code=code, name="name", severity=severity, summary="", ranks=(rank,), why="", fix="", source="")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([finding("DDP404"), finding("DDP208"), finding("DDP209")], "DDP208"),
        ([finding("DDP204")], None),
        ([finding("DDP218", "warning")], None),
        ([finding("DDP209", rank=1)], None),
        ([finding("DDP202", rank=1)], "DDP202"),
    ],
)
def test_the_cause_of_an_end_is_an_error_that_keeps_ranks_from_going_on(
    found: list[Finding], expected: str | None
) -> None:
    """Neither what guard says, nor another reduce-op, nor what may still end well, nor its own end."""
    cause = find_cause_of_end(found, rank=1)
    assert (cause.code if cause is not None else None) == expected
