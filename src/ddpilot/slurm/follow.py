# SPDX-License-Identifier: Apache-2.0
"""Follow a job from any state to its end: why it is pending, its output as it is written, and why it ended."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ddpilot.errors import SlurmError
from ddpilot.slurm.commands import estimate_start, find_lost_nodes, read_accounting, read_job
from ddpilot.slurm.exit_summary import ExitSummary, summarize_exit, summarize_requeue
from ddpilot.slurm.records import JobRecord

_T = TypeVar("_T")
LOOK_S = 2.0
"""Seconds between two questions to Slurm about the job's state."""
_READ_S = 0.2
_LATE_S = 5.0
"""Seconds that output may come after the job's end, over a network file system."""
_TAIL_BYTES = 65_536
_REASONS = {
    "Priority": "jobs of higher priority are in front",
    "Resources": "it waits for nodes to be free",
    "Dependency": "it waits for a different job",
    "BeginTime": "its begin time has not come; requeued jobs wait two minutes",
    "QOSMaxJobsPerUserLimit": "you have as many jobs running as your QOS allows",
    "AssocGrpGRES": "your account uses all GPUs that it may",
    "JobArrayTaskLimit": "as many tasks of the array run as the number after % allows",
    "JobHeldUser": "it is held: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "PartitionConfig": "its partition does not have that many nodes, CPUs or GPUs",
    "PartitionNodeLimit": "its partition allows fewer nodes",
    "PartitionTimeLimit": "its time limit is over the partition's: it will never start",
    "DependencyNeverSatisfied": "the job that it waits for failed: it will never start",
    "launch failed requeued held": "it could not be launched, and is held: scontrol release",
}


def explain_reason(reason: str) -> str:
    """Why a job is pending, as the end of a sentence: Slurm's word, and what it means; "" without a reason."""
    words = _REASONS.get(reason.partition(",")[0], "")
    return f": {reason}{f' ({words})' if words else ''}" if reason else ""


def describe_job(record: JobRecord) -> str:
    """One line: its state, why it waits and when it should start, or where it runs."""
    head = f"job {record.job_id} is {record.state.lower().replace('_', ' ')}"
    if record.phase == "pending":
        return (
            f"{head}{explain_reason(record.reason)}{f', expected to start at {record.start}' if record.start else ''}"
        )
    if record.state == "COMPLETING":  # the rest of the record may be that of the next start
        return f"{head}{f' on {record.nodes}' if record.nodes else ''}"
    if record.phase == "running":
        where = f" on {record.nodes}" if record.nodes else ""
        limit = f", time limit {record.time_limit}" if record.time_limit else ""
        return f"{head}{where} since {record.start or 'now'}{limit}"
    return head


@dataclass
class JobOutput:
    """The output of a job: a file that grows, or two. `show` gets what is new."""

    show: Callable[[str], None]
    path: Path | None = None
    offset: int = 0
    tail: bytes = b""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    error: JobOutput | None = None
    """Standard error, if it is in a different file."""

    def use(self, record: JobRecord) -> None:
        """Read the files of this job from now on, once it has started."""
        if record.phase == "pending":
            return
        self.path = Path(record.output) if record.output else self.path
        if record.error and self.error is None:
            self.error = JobOutput(self.show, Path(record.error))

    def text(self) -> str:
        """The end of what was shown, that of standard error last."""
        return self.tail.decode(errors="replace") + (self.error.text() if self.error is not None else "")

    def read(self) -> bool:
        """Show what is new; False if nothing is."""
        is_more = self.error is not None and self.error.read()
        return self._read_file() or is_more

    def _read_file(self) -> bool:
        if self.path is None:
            return False
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset = 0  # a requeued job began it again
                file.seek(self.offset)
                new = file.read()
        except OSError:  # not yet there
            return False
        if new:
            self.offset += len(new)
            self.tail = (self.tail + new)[-_TAIL_BYTES:]
            self.show(self.decoder.decode(new))
        return bool(new)


class Looks:
    """Asks Slurm again and again. While its controller does not answer, as in a restart, the last answer holds."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._is_outage = False

    def look(self, ask: Callable[[], _T], last: _T) -> _T:
        """Return what `ask` returns, or `last` if Slurm does not answer, which is noted once."""
        try:
            found = ask()
        except SlurmError as error:
            if not error.is_outage:
                raise
            if not self._is_outage:
                self._note(f"Slurm does not answer ({error.found}); asking again until it does")
            self._is_outage = True
            return last
        self._is_outage = False
        return found


def follow_job(
    job_id: str, *, show: Callable[[str], None], note: Callable[[str], None], look_s: float = LOOK_S
) -> tuple[JobRecord, ExitSummary]:
    """Follow a job to its end. `show` gets its output as it comes, `note` lines about its state when that changes.

    Returns the last record and why it ended. Raises SlurmError if Slurm does not know the job.
    """
    output, said = JobOutput(show), ""
    record = ran = read_job(job_id)
    looks = Looks(note)
    next_look_s = time.monotonic() + look_s
    while True:
        if record.num_restarts > ran.num_restarts:
            output.read()
            note(str(explain_requeue(ran, output.text())))
        if record.num_restarts > ran.num_restarts or record.state == "RUNNING":
            ran = record
        if record.phase == "pending":
            record = estimate_start(record)
        if record.phase != "done" and (line := describe_job(record)) != said:
            note(line)
            said = line
        output.use(record)
        if record.phase == "done":
            break
        while time.monotonic() < next_look_s:
            output.read()
            time.sleep(min(_READ_S, look_s))
        record = looks.look(lambda: read_job(job_id), record)
        next_look_s = time.monotonic() + look_s
    read_rest(output)
    return record, summarize_job(record, output.text())


def explain_requeue(ran: JobRecord, output: str) -> ExitSummary:
    """Return why the job was requeued that ran as in `ran`."""
    return summarize_requeue(
        ran, output=output, failure=_failure_note(ran, ".before"), lost_nodes=find_lost_nodes(ran.nodes)
    )


def read_rest(output: JobOutput) -> None:
    """Show what comes after the job's end: a network file system may show it late."""
    end_s = time.monotonic() + (_LATE_S if output.path is not None and not output.path.exists() else 2 * _READ_S)
    while output.read() or time.monotonic() < end_s:
        time.sleep(_READ_S / 2)


def summarize_job(record: JobRecord, output: str | None = None) -> ExitSummary:
    """Return why a job ended. `output`: the end of its output, with standard error; None: read here."""
    if output is None:
        output = "".join(_tail_of(Path(path)) for path in (record.output, record.error) if path)
    if record.state == "COMPLETED":
        return summarize_exit(record)
    return summarize_exit(
        record,
        steps=[each for each in read_accounting(record.job_id) if "." in each.job_id],
        output=output,
        failure=_failure_note(record),
        lost_nodes=find_lost_nodes(record.nodes),
        full_folder=_full_folder(record),
    )


def _failure_note(record: JobRecord, ending: str = "") -> str:
    """What the rank that failed first has noted; the job script renames it to ".before" when it requeues the job."""
    path = Path(record.folder) / f"slurm-{record.number}.failure{ending}"
    return _tail_of(path) if path.is_file() else ""


def _full_folder(record: JobRecord) -> str:
    """The folder of the job's output if its file system has no room left, so that the output may lack its end."""
    folder = os.path.dirname(record.output)
    try:
        found = os.statvfs(folder) if folder else None
    except OSError:
        return ""
    return folder if found is not None and found.f_blocks and found.f_bavail == 0 else ""


def _tail_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
