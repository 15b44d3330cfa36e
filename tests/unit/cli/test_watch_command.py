# SPDX-License-Identifier: Apache-2.0
"""`ddpilot watch` on jobs that run, fail, succeed, or have been reported before."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpilot.cli import watch_command
from ddpilot.cli.watch_command import watch_job
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring import layout
from ddpilot.record.flight_ring.writer import RingWriter
from ddpilot.record.hook import ring_path
from ddpilot.watch import past_jobs
from ddpilot.watch.job_folder import JOBS_VARIABLE, JobInfo, close_job, make_job_folder
from ddpilot.watch.report import Report
from tests.unit.record.rings import ABOUT, open_ring

DESYNC = Finding(code="DDP201", name="desync", severity="error", summary="collective #5 differs", ranks=(0, 1))
DIED = Finding(code="DDP209", name="rank-died", severity="error", summary="rank 1 raised ValueError", ranks=(1,))
LINE = {"file": "train.py", "line": 91, "function": "step", "text": "dist.barrier()", "via": "barrier"}


class Steps:
    """Takes the place of `time`: instead of a sleep, the next thing happens to the job."""

    def __init__(self) -> None:
        self.coming: list[Callable[[], None]] = []

    def sleep(self, _seconds: float) -> None:
        """Nothing but what comes next."""
        self.coming.pop(0)()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What happens while the verb waits; between the two looks of one report nothing does."""
    steps = Steps()
    monkeypatch.setattr(watch_command, "time", steps)
    monkeypatch.setattr(past_jobs, "_BETWEEN_S", 0.0)
    return steps


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, JobInfo]:
    """A job that is running according to its folder."""
    monkeypatch.setenv(JOBS_VARIABLE, str(tmp_path / "jobs"))
    return make_job_folder("train.py", 2, (0, 1))


def save(folder: Path, *findings: Finding) -> None:
    """What its observer does."""
    Report(job=folder.name, name="train.py", world_size=2, findings=Findings(findings)).save(folder)


def test_wait_reports_what_is_new_and_ends_with_a_job_whose_parent_lives_on(
    job: tuple[Path, JobInfo], steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the notebook does that launched it; the same is not printed twice."""
    folder, about = job
    steps.coming = [
        lambda: None,
        lambda: save(folder, DESYNC),
        lambda: close_job(folder, about, is_clean=False),
    ]
    assert watch_job(about.id, wait=True) == 1
    assert steps.coming == []
    out = capsys.readouterr().out
    assert out.count("train.py on 2 ranks") == 3
    assert out.count("DDP201") == 2
    assert "has ended" in out.rpartition("train.py on 2 ranks")[2]


def test_wait_ends_with_a_job_that_ends_well(
    job: tuple[Path, JobInfo], steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which leaves no folder."""
    folder, about = job
    steps.coming = [lambda: close_job(folder, about, is_clean=True)]
    assert watch_job(about.id, wait=True) == 0
    assert f"{about.id} has ended well" in capsys.readouterr().err


@pytest.fixture
def rings(job: tuple[Path, JobInfo]) -> Iterator[tuple[RingWriter, RingWriter]]:
    """Of two ranks, in the job's folder: rank 0 waits in a barrier to which rank 1 never came."""
    writers = []
    for rank in (0, 1):
        ring = open_ring(ring_path(job[0], rank), num_records=16, page_bytes=4096, publish=False)
        mine = {"rank": rank, "pid": 2**22 - 1 - rank, "host": platform.node(), "started_ns": 1}  # no process has that
        ring.publish({**ABOUT, **mine})
        group = {"name": "0", "incarnation": 1, "size": 2, "rank": rank, "ranks": "0-1"}
        refs = [ring.write_fact(fact) for fact in ({"op": "barrier", "operator": "c10d::barrier"}, group, LINE)]
        usual = layout.USUAL.pack(*refs, 0, *[layout.NO_NUMBER] * 3, layout.NOT_ASYNC | layout.ASKED_ANY_TIME, 0)
        index = ring.begin(1000, 0, os.getpid(), 0, usual)
        ring.finish(index, 2000, layout.DONE)
        if rank == 0:
            ring.begin(3000, 1, os.getpid(), 0, usual)
        writers.append(ring)
    yield writers[0], writers[1]
    writers[0].close(0)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(("told", "codes"), [((), ["DDP208"]), ((DIED,), ["DDP209"])])
def test_an_end_that_was_told_is_not_told_again_as_another(
    job: tuple[Path, JobInfo],
    rings: tuple[RingWriter, RingWriter],
    told: tuple[Finding, ...],
    codes: list[str],
) -> None:
    """A closed ring does not show that its rank raised; the job's observer has recorded it."""
    folder, about = job
    rings[1].close(4000)
    save(folder, *told)
    close_job(folder, about, is_clean=False)
    assert [finding.code for finding in past_jobs.explain_job(folder, about).findings] == codes
