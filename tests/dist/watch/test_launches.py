# SPDX-License-Identifier: Apache-2.0
"""Launches that are watched as everybody's are: what ends them, what is only said, and what stays for later."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpilot import Finding, Launcher, RankError, WatchError
from ddpilot.cli.watch_command import watch_job
from ddpilot.errors import LaunchTimeoutError
from ddpilot.watch import observer
from ddpilot.watch.job_folder import JOBS_VARIABLE, JobInfo, list_jobs
from ddpilot.watch.past_jobs import explain_job

NAMED_S = 3.0
"""The bar: from the last progress to the finding."""


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the test's jobs have theirs in."""
    monkeypatch.setenv(JOBS_VARIABLE, str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def run(function: Callable[..., Any], *args: Any, timeout_s: float = 60, **options: Any) -> list[Any]:
    """What 2 ranks return."""
    return list(Launcher(nproc_per_node=2, timeout_s=timeout_s, **options).run(function, *args))


def enter() -> int:
    """Enter a group, and do something together; the rank."""
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def differ(note: Path) -> None:
    """Ranks call different collectives; rank 0 notes when the last thing began that all did."""
    rank = enter()
    if rank == 0:
        note.write_text(str(time.monotonic()))
        dist.all_reduce(torch.ones(2))
    else:
        dist.barrier()


def reduce_differently() -> str:
    """Nothing waits, and every number is wrong."""
    rank = enter()
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    return "came through"


def sleep(seconds: float) -> str:
    """Rank 1 comes late, and comes."""
    rank = enter()
    if rank == 1:
        time.sleep(seconds)
    dist.barrier()
    return "came through"


def hold_the_lock(seconds: int) -> str:
    """Rank 1 is in C code that keeps Python's lock, and comes."""
    rank = enter()
    if rank == 1:
        ctypes.PyDLL(None).sleep(seconds)
    dist.barrier()
    return "came through"


def die() -> None:
    """Rank 1 is killed while rank 0 waits for it."""
    rank = enter()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def give_other_sizes() -> None:
    """gloo aborts one of them."""
    dist.all_reduce(torch.ones(10 + enter()))


def step_together() -> str:
    """Nothing is wrong."""
    enter()
    dist.destroy_process_group()
    return "came through"


def test_launch_ends_with_the_finding_when_ranks_differ(jobs: Path, tmp_path: Path) -> None:
    """Within three seconds, with ranks and lines; the report stays, and the rings alone say the same."""
    note = tmp_path / "note"
    with pytest.raises(WatchError, match=r"running `differ`: desync \(DDP201\)") as caught:
        run(differ, note)
    assert time.monotonic() - float(note.read_text()) < NAMED_S
    (finding,) = caught.value.findings
    assert (finding.code, finding.severity) == ("DDP201", "error")
    ((folder, about),) = list_jobs()
    assert not about.is_running
    assert str(caught.value.findings) in (folder / "report.txt").read_text()
    for name in ("report.json", "report.txt"):
        (folder / name).unlink()
    assert explain_job(folder, about).findings[0].code == "DDP201"


def test_launch_ends_with_the_finding_when_reduce_ops_differ(jobs: Path) -> None:
    """No rank waits for it, and none ever knows."""
    with pytest.raises(WatchError, match=r"reduce-op-mismatch \(DDP204\)"):
        run(reduce_differently)


def test_launch_goes_on_when_findings_are_reported(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The numbers are wrong, which is said; a function is told each finding."""
    told: list[Finding] = []
    assert run(reduce_differently, on_finding="report") == ["came through"] * 2
    assert "ddpilot: reduce-op-mismatch  DDP204" in capfd.readouterr().err
    assert run(reduce_differently, on_finding=told.append) == ["came through"] * 2
    assert [finding.code for finding in told] == ["DDP204"]
    assert list_jobs() == []


def test_launch_says_who_is_waited_for_and_goes_on(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that is late proves nothing: one line says where it is, also where native code holds the GIL."""
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(run, sleep, 4.0), pool.submit(run, hold_the_lock, 4)]
        assert [each.result() for each in late] == [["came through"] * 2] * 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ddpilot: rank 0 has waited ")]
    assert len(lines) == 2
    assert [line for line in lines if "time.sleep(seconds)" in line], lines
    held = [line for line in lines if "ctypes.PyDLL(None).sleep(seconds)" in line]
    assert [line for line in held if "native code holds the GIL" in line], lines
    assert list_jobs() == []


@pytest.mark.parametrize(("how", "code"), [(die, "DDP209"), (give_other_sizes, "DDP202")])
def test_launch_explains_a_death(jobs: Path, how: Callable[[], None], code: str) -> None:
    """What the dead rank was in, or why gloo aborted it, is in the error of the rank."""
    with pytest.raises(RankError) as caught:
        run(how)
    assert [finding.code for finding in caught.value.findings] == [code]
    assert f"{code}  " in str(caught.value)
    assert "test_launches.py:" in str(caught.value.findings)


def test_launch_leaves_nothing_when_it_is_not_watched(jobs: Path) -> None:
    """No folder is made, no ring, and no rank is told of one."""
    assert run(step_together, watch=False) == ["came through"] * 2
    assert not jobs.exists()


def test_launch_goes_on_when_there_is_no_place_for_its_job(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line says that nobody watches."""
    jobs.write_text("not a folder")
    assert run(step_together) == ["came through"] * 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("ddpilot: "))
    assert line.startswith("ddpilot: this job is not watched: its folder cannot be created (")


@pytest.mark.parametrize("what", ["analyze", "ReportHistory.new_findings"])
def test_launch_goes_on_when_the_observer_breaks(
    jobs: Path, what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error of its own is said once, and the ranks hear nothing of it."""

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("injected")

    owner: Any = observer
    for name in what.split(".")[:-1]:
        owner = getattr(owner, name)
    monkeypatch.setattr(owner, what.rpartition(".")[2], fail)
    assert run(sleep, 1.0) == ["came through"] * 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ddpilot: ")]
    assert len(lines) == 1, lines
    assert "the observer failed, and the job continues: ZeroDivisionError: injected" in lines[0]


def test_launch_goes_on_when_no_observer_can_be_made(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error of the watch's own before it has begun to look."""

    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(observer, "RuleRunner", fail)
    assert run(step_together) == ["came through"] * 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("ddpilot: "))
    assert line == "ddpilot: this job is not watched: ZeroDivisionError: injected"


def test_launch_that_takes_too_long_has_what_was_found(jobs: Path, tmp_path: Path) -> None:
    """Where findings end no job, a stall runs into the limit."""
    with pytest.raises(LaunchTimeoutError, match="DDP201") as caught:
        run(differ, tmp_path / "note", on_finding="report", timeout_s=8)
    assert "DDP201" in [finding.code for finding in caught.value.findings]


def test_launch_goes_on_when_on_finding_raises(jobs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is the user's own function: what it raised is said."""

    def complain(finding: Finding) -> None:
        raise LookupError(finding.code)

    assert run(reduce_differently, on_finding=complain) == ["came through"] * 2
    assert "ddpilot: `on_finding` raised LookupError: DDP204" in capfd.readouterr().err


def test_watch_explains_a_job_that_runs(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the number of any of its processes; what it waits for is no error."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, sleep, 6.0)
        about = await_job()
        while "has waited" not in (shown := show(about.id, capsys)):
            assert not job.done(), shown
        assert "running since" in shown
        assert "time.sleep(seconds)" in shown
        assert f"{about.id}  running" in show(None, capsys)
        assert job.result() == ["came through"] * 2


def await_job() -> JobInfo:
    """The one job that there is, once there is one."""
    deadline = time.monotonic() + 30
    while not (found := list_jobs()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0][1]


def show(word: str | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What `ddpilot watch` prints, where it finds no error."""
    capsys.readouterr()
    assert watch_job(word) == 0
    return capsys.readouterr().out
