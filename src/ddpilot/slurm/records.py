# SPDX-License-Identifier: Apache-2.0
"""`JobRecord`: what Slurm reports about a job, parsed from the output of scontrol and sacct.

Their text is the same in all versions of Slurm, unlike the JSON of squeue, and needs no plugin of the site.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["pending", "running", "done"]

_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_UNSET = ("", "(null)", "Unknown", "None", "N/A", "None assigned")
SACCT_FIELDS = (
    *("JobID", "JobName", "State", "ExitCode", "Reason", "NodeList", "NNodes", "NTasks", "Start", "End", "Elapsed"),
    *("Timelimit", "MaxRSS", "ReqMem", "JobIDRaw", "Submit", "WorkDir"),
)
_CODE_OF_SIGNAL = 128
_LESS_BY_SACCT = (9, 15)
"""Exit codes that sacct writes for 137 and 143, which are those of a step whose tasks were killed or terminated."""
_STARTED_AGAIN = ("REQUEUED", "NODE_FAIL", "PREEMPTED")
"""States that sacct keeps of a start after which the job was requeued."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job, an array's task or a step, as Slurm reports it. Texts are "" if Slurm reports nothing."""

    job_id: str
    """Number, for a task of an array as in "12_3", for a step as in "12.0" or "12.batch"."""
    state: str
    """Slurm's word, such as PENDING, RUNNING or OUT_OF_MEMORY."""
    name: str = ""
    """Name of the job or step."""
    reason: str = ""
    """Why it is pending, or why it ended as it did."""
    nodes: str = ""
    """List of its nodes, such as "n[1-4]"."""
    start: str = ""
    """Start, or the estimate while it is pending, as Slurm writes it."""
    end: str = ""
    """End."""
    run_time: str = ""
    """Time that it has run, such as "00:12:03"."""
    time_limit: str = ""
    """Time limit, such as "02:00:00"."""
    exitcode: int = 0
    """Exit code of the job script or step."""
    exit_signal: int = 0
    """Signal that ended it, or 0."""
    num_restarts: int = 0
    """Times that it was requeued."""
    preempted: str = ""
    """When a job of higher priority claimed its nodes; sacct does not record it."""
    is_accounted: bool = False
    """True if it is from sacct."""
    cancelled_by: str = ""
    """Number of the user who cancelled it, by sacct alone; "" also of what Slurm has ended itself."""
    output: str = ""
    """Path of its output."""
    error: str = ""
    """Path of its standard error, if it is a different file."""
    folder: str = ""
    """Folder that it runs in."""
    number: str = ""
    """SLURM_JOB_ID in the job: for a task of an array it differs from `job_id`."""
    memory: str = ""
    """Memory that was asked for; for a step, the most that a task of it used."""

    @property
    def task_number(self) -> int:
        """Number of an array's task, the first one of several that wait together; -1 for other jobs."""
        return next(iter(self.task_numbers), -1)

    @property
    def task_numbers(self) -> tuple[int, ...]:
        """Numbers of the tasks that it is about: several if they wait together, such as those of "12_[3-5,8%2]"."""
        ranges = self.job_id.partition("_")[2].strip("[]").partition("%")[0]
        found = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", ranges)
        return tuple(
            i for first, last, step in found for i in range(int(first), int(last or first) + 1, int(step or 1))
        )

    @property
    def phase(self) -> Phase:
        """Whether it waits, runs (or is just ending), or is done."""
        return "pending" if self.state in _PENDING else "running" if self.state in _RUNNING else "done"


def parse_scontrol(text: str) -> tuple[JobRecord, ...]:
    """Parse ``scontrol --oneliner show job``: a record for each line with a job."""
    return tuple(_record(_pairs(line)) for line in text.splitlines() if "JobId=" in line)


def _pairs(line: str) -> dict[str, str]:
    """The fields of a line; values may have blanks, names begin with a capital."""
    parts = re.split(r"(?:^|\s)([A-Z][A-Za-z:/]*)=", line)
    pairs: dict[str, str] = {}
    for name, value in zip(parts[1::2], parts[2::2], strict=True):
        pairs.setdefault(name, value.strip())
    return pairs


def _record(pairs: dict[str, str]) -> JobRecord:
    code, signal = _exit(pairs.get("ExitCode", ""))
    output, error = (_fill_in(_text(pairs.get(name)), pairs.get("BatchHost", "")) for name in ("StdOut", "StdErr"))
    array, task = pairs.get("ArrayJobId", ""), pairs.get("ArrayTaskId", "")
    restarts = pairs.get("Restarts", "")
    return JobRecord(
        job_id=f"{array}_{task}" if array and task else pairs["JobId"],
        state=pairs.get("JobState", ""),
        name=_text(pairs.get("JobName")),
        reason=_text(pairs.get("Reason")),
        nodes=_text(pairs.get("NodeList")),
        start=_text(pairs.get("StartTime")),
        end=_text(pairs.get("EndTime")),
        run_time=_text(pairs.get("RunTime")),
        time_limit=_text(pairs.get("TimeLimit")),
        exitcode=code,
        exit_signal=signal,
        num_restarts=int(restarts) if restarts.isdecimal() else 0,
        preempted=_text(pairs.get("PreemptTime")),
        output=output,
        error=error if error != output else "",
        folder=_text(pairs.get("WorkDir")),
        number=pairs["JobId"],
        memory=_text(pairs.get("MinMemoryNode") or pairs.get("MinMemoryCPU")),
    )


def _fill_in(path: str, node: str) -> str:
    """The path of a job's file, with those of sbatch's marks that scontrol leaves in it."""
    values = {"N": node.partition(".")[0], "n": "0", "t": "0"}
    return re.sub(r"%([Nnt])", lambda found: values[found[1]] or found[0], path)


def parse_lost_nodes(text: str) -> dict[str, str]:
    """Parse ``scontrol --oneliner show node``: by name of each node that is down or does not answer, the reason."""
    found = {}
    for pairs in map(_pairs, text.splitlines()):
        state = pairs.get("State", "")
        if "NodeName" in pairs and ("DOWN" in state or "FAIL" in state or state.partition("+")[0].endswith("*")):
            found[pairs["NodeName"]] = _text(pairs.get("Reason")).partition(" [")[0]
    return found


def parse_sacct(text: str) -> tuple[JobRecord, ...]:
    """Parse ``sacct --parsable2 --noheader --duplicates --format=`` with `SACCT_FIELDS`: each job, then its steps.

    Of a job that was requeued, sacct has a record for each start, and of a number that Slurm has used again one for
    each job: the last of them counts.
    """
    found: list[tuple[str, list[JobRecord]]] = []
    for line in text.splitlines():
        values = dict(zip(SACCT_FIELDS, line.split("|", len(SACCT_FIELDS) - 1), strict=False))
        if len(values) < len(SACCT_FIELDS):
            continue
        if "." not in values["JobID"]:
            found.append((values["Submit"], []))
        if found:
            found[-1][1].append(_accounted(values))
    last: dict[str, list[JobRecord]] = {}
    for _, (job, *steps) in sorted(found, key=lambda each: each[0]):
        before = last.pop(job.job_id, None)
        is_same = before is not None and before[0].state in _STARTED_AGAIN
        num = before[0].num_restarts + 1 if before is not None and is_same else 0
        last[job.job_id] = [replace(job, num_restarts=num), *steps]
    return tuple(itertools.chain.from_iterable(last.values()))


def _accounted(values: dict[str, str]) -> JobRecord:
    code, signal = _exit(values["ExitCode"])
    code += _CODE_OF_SIGNAL if code in _LESS_BY_SACCT else 0
    return JobRecord(
        job_id=values["JobID"],
        state=values["State"].partition(" ")[0].rstrip("+"),
        name=values["JobName"],
        reason=_text(values["Reason"]),
        nodes=_text(values["NodeList"]),
        start=_text(values["Start"]),
        end=_text(values["End"]),
        run_time=values["Elapsed"],
        time_limit=_text(values["Timelimit"]),
        exitcode=code,
        exit_signal=signal,
        is_accounted=True,
        cancelled_by=values["State"].partition("CANCELLED by ")[2],
        folder=values["WorkDir"],
        number=values["JobIDRaw"],
        memory=values["MaxRSS" if "." in values["JobID"] else "ReqMem"],
    )


def _exit(text: str) -> tuple[int, int]:
    """Exit code and signal in Slurm's "CODE:SIGNAL"."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _text(value: str | None) -> str:
    return "" if value is None or value in _UNSET else value
