# SPDX-License-Identifier: Apache-2.0
"""Tasks of a job array: their state in one line, their order, their output by whole lines."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        "array 7: tasks 1 run, tasks 2-5%2 are pending: JobArrayTaskLimit (as many tasks of the array run as the "
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

    def read_jobs(job_id: str) -> tuple[JobRecord, ...]:
        assert job_id == "7"
        found = next(answers)
        if found is last:
            (tmp_path / "0").write_text("loss 1\nloss 2\n")
        return found

    shown: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(arrays, "read_jobs", read_jobs)
    assert follow_array("7", show=shown.append, note=notes.append, look_s=0.01) == last
    assert sorted("".join(shown).splitlines()) == ["0: loss 1", "0: loss 2", "1: done"]
    assert notes[0] == "array 7: tasks 0 run, tasks 1 are pending"
    assert notes[1] == "job 7_0 completed"
    assert notes[2].startswith("job 7_1 ended (FAILED)")
    assert notes[3] == "array 7: 1 of 2 tasks completed; not: 1 (FAILED)"
