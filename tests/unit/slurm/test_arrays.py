# SPDX-License-Identifier: Apache-2.0
"""Tasks of a job array: their state in one line, their order, their output by whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot.errors import SlurmError
from ddpilot.slurm import arrays
from ddpilot.slurm.arrays import describe_array, follow_array, is_array, summarize_array
from ddpilot.slurm.records import JobRecord


def task(number: str, state: str, **given: str) -> JobRecord:
    """A record of a task, or of several that wait, of array 7."""
    return JobRecord(job_id=f"7_{number}", state=state, **given)  # type: ignore[arg-type]


def test_an_array_is_described_by_the_tasks_that_run_and_wait() -> None:
    """With Slurm's reason, and tasks that wait together counted one by one."""
    records = (task("0", "COMPLETED"), task("1", "RUNNING"), task("2-5%2", "PENDING", reason="JobArrayTaskLimit"))
    assert describe_array("7", records) == (
        "array 7: task 1 runs, tasks 2-5%2 are pending: JobArrayTaskLimit (as many tasks of the array run as the "
        "number after % allows), 1 is done"
    )
    assert is_array(records)
    assert not is_array([JobRecord(job_id="7", state="RUNNING")])


def test_an_array_that_is_over_names_the_tasks_that_did_not_complete() -> None:
    """Also those that never ran."""
    records = (task("0", "COMPLETED"), task("1", "FAILED"), task("[2-6:2,9%2]", "CANCELLED"))
    assert summarize_array("7", records) == "array 7: 1 of 6 tasks completed; not: 1, 2-6:2,9%2 (FAILED, CANCELLED)"
    assert summarize_array("7", records[:1]) == "array 7: 1 of 1 tasks completed"


def test_tasks_are_followed_with_their_numbers_to_the_end_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is shown whole, whichever part of it has been written, and each end once."""
    (tmp_path / "0").write_text("loss 1\nlo")
    (tmp_path / "1").write_text("done")
    first = (task("0", "RUNNING", output=str(tmp_path / "0")), task("1", "PENDING"))
    last = (task("0", "COMPLETED", output=str(tmp_path / "0")), task("1", "FAILED", output=str(tmp_path / "1")))
    answers = iter([first, last])

    def read_jobs(job_id: str, *, only_recent: bool = False) -> tuple[JobRecord, ...]:
        assert job_id == "7"
        found = next(answers)
        if found is last:
            assert only_recent
            (tmp_path / "0").write_text("loss 1\nloss 2\n")
        return found

    shown: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(arrays, "read_jobs", read_jobs)
    assert follow_array("7", show=shown.append, note=notes.append, look_s=0.01) == last
    assert sorted("".join(shown).splitlines()) == ["0: loss 1", "0: loss 2", "1: done"]
    assert notes[0] == "array 7: task 0 runs, task 1 is pending"
    assert notes[1] == "job 7_0 completed"
    assert notes[2].startswith("job 7_1 ended (FAILED)")
    assert notes[3] == "array 7: 1 of 2 tasks completed; not: 1 (FAILED)"


def test_tasks_that_slurmctld_has_forgotten_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ended keeps its record, so that its failure counts; one that was seen running last is unknown."""
    first = (task("0", "FAILED", run_time="1"), task("1", "RUNNING"), task("2", "RUNNING"))
    answers = iter([first, first[2:], first[2:], (task("2", "COMPLETED"),)])
    monkeypatch.setattr(arrays, "read_jobs", lambda job_id, only_recent=False: next(answers))
    notes: list[str] = []
    records = follow_array("7", show=lambda text: None, note=notes.append, look_s=0.01)
    assert [each.state for each in records] == ["FAILED", "UNKNOWN", "COMPLETED"]
    assert "job 7_1 ended (UNKNOWN): Slurm has forgotten how, and the site keeps no accounts" in notes
    assert notes[-1] == "array 7: 1 of 3 tasks completed; not: 0, 1 (FAILED, UNKNOWN)"


def test_tasks_that_were_over_before_are_shown_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for output that a network file system may show late: there may be a thousand of them."""
    (tmp_path / "out").write_text("done\n")
    records = tuple(task(str(i), "COMPLETED", output=str(tmp_path / "out")) for i in range(100))
    monkeypatch.setattr(arrays, "read_jobs", lambda job_id: records)
    monkeypatch.setattr(arrays, "read_rest", None)
    shown: list[str] = []
    follow_array("7", show=shown.append, note=lambda line: None)
    assert len(shown) == 100


def test_requeue_of_a_task_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its job script wrote; the others have nothing to do with it."""
    (tmp_path / "1").write_text(
        "ddpilot: SIGUSR1: the checkpoint in ckpt is written\nexit code 75: job 7_1 is requeued\n"
    )
    out = str(tmp_path / "1")
    again = JobRecord(job_id="7_1", state="PENDING", num_restarts=1, output=out)
    answers = iter([(task("1", "RUNNING", output=out),), (again,), (task("1", "COMPLETED", output=out),)])
    monkeypatch.setattr(arrays, "read_jobs", lambda job_id, only_recent=False: next(answers))
    notes: list[str] = []
    follow_array("7", show=lambda text: None, note=notes.append, look_s=0.01)
    assert "job 7_1 was requeued: its ranks saved a checkpoint and exited with code 75 after SIGUSR1" in notes[2]


def test_array_is_followed_over_a_restart_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the controller does not answer, the last records hold, and that is noted once."""
    outage = SlurmError("looking up job 7", found="Unable to contact slurm controller", is_outage=True)
    answers: Iterator[object] = iter([(task("1", "RUNNING"),), outage, outage, (task("1", "COMPLETED"),)])

    def read_jobs(job_id: str, *, only_recent: bool = False) -> object:
        found = next(answers)
        if isinstance(found, SlurmError):
            raise found
        return found

    monkeypatch.setattr(arrays, "read_jobs", read_jobs)
    notes: list[str] = []
    follow_array("7", show=lambda text: None, note=notes.append, look_s=0.01)
    assert notes[1:3] == [
        "Slurm does not answer (Unable to contact slurm controller); asking again until it does",
        "job 7_1 completed",
    ]
