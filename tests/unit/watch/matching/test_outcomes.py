# SPDX-License-Identifier: Apache-2.0
"""Jobs that were ended as a whole from outside, and ranks that watch itself has ended."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring import layout
from ddpilot.record.hook import ring_path
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.job_folder import JOBS_VARIABLE, JobInfo, close_job, make_job_folder
from ddpilot.watch.matching.outcomes import COMMON_END
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.past_jobs import explain_job
from ddpilot.watch.report import Report
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankSnapshot
from tests.unit.record.rings import ABOUT, open_ring
from tests.unit.watch.logs import FILE, S, Writer, alive, died, group_of, job, returned

WORLD = group_of(0, 1)
LOCK = PythonStack(taken_ns=103 * S, frames=(CodeLine(FILE, 8, "get", "with lock:"),))
UNSEEN = ProcessState(pid=1, state="ended")
CHANGED = Finding(code="DDP325", name="changed-after-wrapping", severity="error", summary="4 differ", ranks=(0, 1))


def pair() -> tuple[Writer, Writer]:
    """Rank 0 waits since 0.02 s for rank 1."""
    zero, one = (Writer(rank, WORLD).call("all_reduce", 1) for rank in (0, 1))
    return zero.wait("barrier", 9), one


def ended(*beats_s: float) -> JobSnapshot:
    """Both are gone, nobody knows how, and their rings were written last then; rank 1 was in a lock."""
    zero, one = (
        alive(rank, log=rank.log(heartbeat_ns=int(at_s * S)), process=UNSEEN)
        for rank, at_s in zip(pair(), beats_s, strict=True)
    )
    return job([zero, replace(one, stack=LOCK)], after_s=3600)


def is_kept(analysis: Analysis) -> bool:
    """No rank is blamed, and who waited for what is said as it was at the end."""
    (line,) = analysis.status
    is_as_it_was = line.startswith("rank 0 has waited 5.0 s in barrier") and "rank 1 has not called it" in line
    return is_as_it_was and analysis.end == COMMON_END and not analysis.findings


def test_a_job_that_was_ended_as_a_whole_keeps_what_it_waited_for() -> None:
    """From its rings alone, however long ago; and where who started it saw the signals."""
    analysis = analyze(ended(105.02, 105.0))
    assert is_kept(analysis)
    assert "with lock:" in analysis.status[0]
    zero, one = pair()
    at_ns = 105_020_000_000
    assert is_kept(analyze(job([died(rank, "SIGTERM", -15, at_ns) for rank in (zero, one)], after_s=3600)))


def test_a_job_that_was_ended_as_a_whole_after_a_long_wait_has_the_warning() -> None:
    """As it had while it ran."""
    analysis = analyze(ended(145.0, 145.0))
    assert [(each.code, each.severity, each.ranks) for each in analysis.findings] == [("DDP218", "warning", (1,))]


@pytest.mark.parametrize(
    "views",
    [
        [died(pair()[0], "SIGTERM", -15), died(pair()[1], "SIGKILL", -9)],
        [died(pair()[0], ended_ns=106 * S), died(pair()[1])],
        [died(pair()[0], "SIGABRT", -6), died(pair()[1], "SIGABRT", -6)],
        [died(pair()[0]), returned(pair()[1])],
        [alive(pair()[0]), died(pair()[1])],
        list(ended(105.2, 105.0).ranks.values()),
    ],
)
def test_ranks_that_did_not_end_together_from_outside_are_blamed(views: list[object]) -> None:
    """One was first, ended by itself, or in another way."""
    analysis = analyze(job(views))  # type: ignore[arg-type]
    assert [each.severity for each in analysis.findings] == ["error"]
    assert analysis.findings[0].ranks == (1,) or "SIGABRT" in str(analysis.findings[0])
    assert not analysis.end


@pytest.mark.parametrize(("killed_s", "blamed"), [(-0.2, 1), (0.001, 1), (1.0, 2)])
def test_a_rank_that_was_killed_is_blamed_and_not_one_that_aborts_because_of_it(killed_s: float, blamed: int) -> None:
    """As NCCL's watchdog does without a peer. A launcher kills a second after it has seen the abort."""
    world = group_of(0, 1, 2)
    zero, one, two = (Writer(rank, world).call("all_reduce", 1) for rank in (0, 1, 2))
    ends = [died(one, ended_ns=105 * S + int(killed_s * S)), died(two, "SIGABRT", -6)]
    (finding,) = analyze(job([alive(zero.wait("barrier", 9)), *ends])).findings
    assert (finding.code, finding.ranks) == ("DDP209", (blamed,))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, JobInfo]:
    """Two ranks that have recorded, and were ended one after the other."""
    monkeypatch.setenv(JOBS_VARIABLE, str(tmp_path / "jobs"))
    folder, about = make_job_folder("train.py", 2, (0, 1))
    for rank in (0, 1):
        ring = open_ring(ring_path(folder, rank), num_records=16, page_bytes=4096, publish=False)
        mine = {"rank": rank, "pid": 2**22 - 1 - rank, "host": platform.node(), "started_ns": 1}  # no process has that
        ring.publish({**ABOUT, **mine})
        refs = [ring.write_fact({"op": "barrier", "operator": "c10d::barrier"}), 0, 0]
        usual = layout.USUAL.pack(*refs, 0, *[layout.NO_NUMBER] * 3, layout.NOT_ASYNC | layout.ASKED_ANY_TIME, 0)
        ring.finish(ring.begin(1000, 0, os.getpid(), 0, usual), 2000, layout.DONE)
    return folder, about


@pytest.mark.parametrize("is_caused", [False, True])
def test_the_end_that_watch_has_caused_is_no_finding(recorded: tuple[Path, JobInfo], is_caused: bool) -> None:
    """The same end is one where somebody else caused it."""
    told: list[Report] = []
    facts = {
        rank: RankSnapshot(rank=rank, process=replace(UNSEEN, signal_name="SIGTERM", ended_ns=(1 + rank) * S))
        for rank in (0, 1)
    }
    observer = Observer(recorded[0], 2, facts=lambda: facts, notify=told.append, options=WatchOptions())
    observer.finish(is_caused=is_caused)
    codes = [finding.code for report in told for finding in report.findings]
    assert codes == ([] if is_caused else ["DDP209"])


@pytest.mark.parametrize(("saved", "codes"), [((), ["DDP209"]), ((CHANGED,), ["DDP325"])])
def test_the_end_that_watch_has_caused_is_no_finding_afterwards(
    recorded: tuple[Path, JobInfo], saved: tuple[Finding, ...], codes: list[str]
) -> None:
    """The error for which the ranks were ended was saved."""
    folder, about = recorded
    Report(job=about.id, name="train.py", world_size=2, findings=Findings(saved)).save(folder)
    close_job(folder, about, is_clean=False)
    report = explain_job(folder, about)
    assert [finding.code for finding in report.findings] == codes
    assert COMMON_END not in report.notes


def test_ends_that_nobody_saw_are_told_of_several_ranks_in_the_plural() -> None:
    """Two of three are gone."""
    writers = [Writer(rank, group_of(0, 1, 2)).call("all_reduce", 1) for rank in range(3)]
    gone = [alive(rank, log=rank.log(heartbeat_ns=105 * S), process=UNSEEN) for rank in writers[:2]]
    (finding,) = analyze(job([*gone, alive(writers[2])])).findings
    assert finding.summary == "ranks 0,1 ended without closing the recording, as with a signal or os._exit"


def test_a_ring_that_is_damaged_is_said_afterwards(recorded: tuple[Path, JobInfo]) -> None:
    """By who explains the job from its folder."""
    folder, about = recorded
    close_job(folder, about, is_clean=False)
    ring_path(folder, 1).write_bytes(b"#" * 9000)
    (note,) = [note for note in explain_job(folder, about).notes if "cannot be read" in note]
    assert note.startswith(f"the recording of rank 1 in {folder} cannot be read: 9000 bytes that start with b'####")
