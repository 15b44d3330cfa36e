# SPDX-License-Identifier: Apache-2.0
"""Follow all tasks of a job array: their output with their numbers, how each ended, and what became of the array."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence

from ddpilot.slurm.commands import read_jobs
from ddpilot.slurm.follow import LOOK_S, JobOutput, explain_reason, read_rest, summarize_job
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
    parts = [f"tasks {_tasks(running)} run" if running else ""]
    parts += [f"tasks {_tasks(pending)} are pending{explain_reason(reason)}" if pending else ""]
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
    """Number of tasks; a record may be about several that wait, such as those of "12_[3-5,8%2]"."""
    num = 0
    for each in records:
        for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", _numbers(each).partition("%")[0]):
            num += len(range(int(first), int(last or first) + 1, int(step or 1)))
    return num


def _numbers(record: JobRecord) -> str:
    return record.job_id.partition("_")[2].strip("[]")


def _tasks(records: Iterable[JobRecord]) -> str:
    names = [_numbers(each) for each in records]
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


def follow_array(
    job_id: str, *, show: Callable[[str], None], note: Callable[[str], None], look_s: float = LOOK_S
) -> tuple[JobRecord, ...]:
    """Follow all tasks of an array to their ends. `show` gets their output as it comes, with "TASK: " before each line.

    `note` gets lines about the array's state when that changes, and how each task ended. Returns the last records.
    """
    outputs: dict[str, tuple[JobOutput, _Labelled]] = {}
    over: set[str] = set()
    said = ""
    while True:
        records = read_jobs(job_id)
        for each in records:
            if each.phase != "pending" and each.output and each.job_id not in outputs:
                labelled = _Labelled(show, str(each.task_number))
                outputs[each.job_id] = JobOutput(labelled), labelled
                outputs[each.job_id][0].use(each)
        is_over = all(each.phase == "done" for each in records)
        if not is_over and (line := describe_array(job_id, records)) != said:
            note(line)
            said = line
        for each in records:
            if each.phase == "done" and each.job_id not in over:
                over.add(each.job_id)
                note(_end_of(each, *outputs.get(each.job_id, (None, None))))
        if is_over:
            note(summarize_array(job_id, records))
            return records
        next_look_s = time.monotonic() + look_s
        while time.monotonic() < next_look_s:
            for output, _ in outputs.values():
                output.read()
            time.sleep(min(_READ_S, look_s))


def _end_of(record: JobRecord, output: JobOutput | None, labelled: _Labelled | None) -> str:
    """Show the rest of a task's output, and return why the task ended."""
    if output is None or labelled is None:
        return str(summarize_job(record))
    read_rest(output)
    labelled.end()
    return str(summarize_job(record, output.text()))
