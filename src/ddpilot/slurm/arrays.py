# SPDX-License-Identifier: Apache-2.0
"""Follow all tasks of a job array: their output with their numbers, how each ended, and what became of the array."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ddpilot.slurm.commands import read_jobs
from ddpilot.slurm.follow import LOOK_S, JobOutput, Looks, explain_reason, explain_requeue, read_rest, summarize_job
from ddpilot.slurm.records import JobRecord

_READ_S = 0.2
_MAX_NAMED = 8


def is_array(records: Sequence[JobRecord]) -> bool:
    """True if these are the tasks of an array."""
    return any(each.task_number >= 0 for each in records)


def describe_array(job_id: str, records: Sequence[JobRecord]) -> str:
    """One line: which tasks run, which wait and why, and how many are done."""
    running = [each for each in records if each.phase == "running"]
    pending = [each for each in records if each.phase == "pending"]
    reason = next((each.reason for each in pending if each.reason), "")
    parts = [_verb(running, "runs", "run") if running else ""]
    parts += [f"{_verb(pending, 'is', 'are')} pending{explain_reason(reason)}" if pending else ""]
    num_done = _count(each for each in records if each.phase == "done")
    parts += [f"{num_done} {'is' if num_done == 1 else 'are'} done" if num_done else ""]
    return f"array {job_id}: {', '.join(filter(None, parts))}"


def summarize_array(job_id: str, records: Sequence[JobRecord]) -> str:
    """One line about an array whose tasks are done: how many completed, and which failed."""
    failed = [each for each in records if each.state != "COMPLETED"]
    num = _count(records)
    line = f"array {job_id}: {num - _count(failed)} of {num} tasks completed"
    states = ", ".join(dict.fromkeys(each.state for each in failed))
    return f"{line}; not: {_tasks(failed)} ({states})" if failed else line


def _count(records: Iterable[JobRecord]) -> int:
    """Number of tasks; a record may be about several that wait."""
    return sum(len(each.task_numbers) for each in records)


def _verb(records: Sequence[JobRecord], one: str, several: str) -> str:
    is_one = _count(records) == 1
    return f"task{'' if is_one else 's'} {_tasks(records)} {one if is_one else several}"


def _tasks(records: Iterable[JobRecord]) -> str:
    names = [each.job_id.partition("_")[2].strip("[]") for each in records]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"


class _Labelled:
    """Passes whole lines on to `show`, each with the number of its task in front."""

    def __init__(self, show: Callable[[str], None], label: str) -> None:
        self._show, self._label, self._rest = show, label, ""

    def __call__(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._show("".join(f"{self._label}: {line}\n" for line in lines))

    def end(self) -> None:
        """Pass on a last line without its end."""
        if self._rest:
            self("\n")


class _Task:
    """A task of an array that has started: its output, and what Slurm reported while it ran last."""

    def __init__(self, record: JobRecord, show: Callable[[str], None]) -> None:
        self._labelled = _Labelled(show, str(record.task_number))
        self._ran = record
        self._is_over = False
        self._may_be_late = record.phase != "done"
        self.output = JobOutput(self._labelled)

    def use(self, record: JobRecord, note: Callable[[str], None]) -> None:
        """Take up what Slurm reports now; note why the task was requeued, and how it ended."""
        self.output.use(record)
        is_again = record.num_restarts > self._ran.num_restarts
        if is_again:
            self.output.read()
            note(str(explain_requeue(self._ran, self.output.text())))
        if is_again or record.state == "RUNNING":
            self._ran, self._is_over = record, False
        if record.phase == "done" and not self._is_over:
            self._is_over = True
            if self._may_be_late:
                read_rest(self.output)
            self.output.read()
            self._labelled.end()
            note(str(summarize_job(record, self.output.text())))


def follow_array(
    job_id: str, *, show: Callable[[str], None], note: Callable[[str], None], look_s: float = LOOK_S
) -> tuple[JobRecord, ...]:
    """Follow all tasks of an array to their ends. `show` gets their output as it comes, with "TASK: " before each line.

    `note` gets lines about the array's state when that changes, why tasks were requeued, and how each ended. Returns
    the last records.
    """
    tasks: dict[str, _Task] = {}
    said = ""
    records, looks = read_jobs(job_id), Looks(note)
    while True:
        is_over = all(each.phase == "done" for each in records)
        if not is_over and (line := describe_array(job_id, records)) != said:
            note(line)
            said = line
        for each in records:
            if each.job_id not in tasks and each.phase != "pending":
                tasks[each.job_id] = _Task(each, show)
            if each.job_id in tasks:
                tasks[each.job_id].use(each, note)
        if is_over:
            note(summarize_array(job_id, records))
            return records
        next_look_s = time.monotonic() + look_s
        while time.monotonic() < next_look_s:
            for task in tasks.values():
                task.output.read()
            time.sleep(min(_READ_S, look_s))
        records = looks.look(functools.partial(_read_again, job_id, records), records)


def _read_again(job_id: str, before: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
    """Return the records of all tasks: those of `before` stay, which slurmctld has forgotten since they ended."""
    records = read_jobs(job_id, only_recent=True)
    if any(each.phase != "done" for each in _missing(before, records)):
        records = read_jobs(job_id)
    gone = [each if each.phase == "done" else replace(each, state="UNKNOWN") for each in _missing(before, records)]
    return tuple(sorted((*gone, *records), key=lambda each: each.task_number))


def _missing(before: Sequence[JobRecord], records: Sequence[JobRecord]) -> list[JobRecord]:
    """The records of `before` about tasks of which `records` have none."""
    there = {number for each in records for number in each.task_numbers}
    return [each for each in before if not there.intersection(each.task_numbers)]
