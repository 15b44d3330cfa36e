# SPDX-License-Identifier: Apache-2.0
"""Why a job ended, in a few lines: from Slurm's records, the job's output, and what its ranks have noted."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ddpilot.slurm.records import JobRecord

_ADVICE = {
    "TIMEOUT": "ask for more with `--time`, or use `--requeue`, with which a Loop or Trainer saves and goes on",
    "OUT_OF_MEMORY": "ask for more with `--mem` or `--mem-per-cpu`, or use fewer DataLoader workers",
    "NODE_FAIL": "submit it again, without that node by `--exclude`; `--requeue` does so by itself",
    "PREEMPTED": "with `--requeue` it is requeued and goes on from its checkpoint",
}
_CAUSES = {
    "TIMEOUT": "its time limit{limit} was reached",
    "OUT_OF_MEMORY": "it used more memory than it had asked for, and the kernel killed a process of it",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "a job of higher priority took its nodes",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline was reached",
    "BOOT_FAIL": "a node did not boot",
}

_OOM = re.compile(r"oom[-_]kill|Out Of Memory|oom killer", re.I)
_TASK = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)")
_STEP = re.compile(
    r"(?:slurmstepd\S*|srun): error: \*\*\* (?P<what>.+) \*\*\*|srun: error: (?P<node>Node failure on .+)"
)
_ENDED = re.compile(r"Terminated|exit code (143|137)\b")
_ENDED_BY_SRUN = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_DUE = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}
_LABEL = re.compile(r"^(?P<rank>\d+): (?P<text>.*)$")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Failure)\b.*")


@dataclass(frozen=True)
class ExitSummary:
    """`cause`: one line; `details`: lines of evidence, the first failure in time first; `advice`: what to do, or ""."""

    cause: str
    details: tuple[str, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        lines = [self.cause, *(f"  {line}" for line in self.details)]
        return "\n".join([*lines, *([f"  what to do: {self.advice}"] if self.advice else [])])


def summarize_exit(
    record: JobRecord, *, steps: Sequence[JobRecord] = (), output: str = "", failure: str = ""
) -> ExitSummary:
    """Return why the job of `record` ended.

    `steps`: records of its steps, by sacct; `output`: the end of its output; `failure`: the note of the rank that
    failed first, if the job script asked for one.
    """
    state = _effective_state(record, steps, output)
    limit = f" of {record.time_limit}" if record.time_limit else ""
    after = f" after {record.run_time}" if record.run_time else ""
    restarts = f", requeued {record.num_restarts}x before" if record.num_restarts else ""
    shown = state if state == record.state else f"{record.state}, {state}"
    head = f"job {record.job_id} ended{after} ({shown}{restarts})"
    if state == "COMPLETED":
        return ExitSummary(f"job {record.job_id} completed{after}{restarts}")
    cause = _CAUSES.get(state, "").format(limit=limit) or _describe_exit(record, output)
    details = [*_first_failure(output, failure), *_slurm_lines(output), *_memory_lines(state, record, steps)]
    return ExitSummary(f"{head}: {cause}", tuple(dict.fromkeys(details)), _ADVICE.get(state, ""))


def _effective_state(record: JobRecord, steps: Sequence[JobRecord], output: str) -> str:
    """The state that names the cause: a step's, or that of the output, where the job's own is FAILED or CANCELLED."""
    if record.state not in ("FAILED", "CANCELLED"):
        return record.state
    if record.preempted:
        return "PREEMPTED"
    for step in steps:
        if step.state in ("OUT_OF_MEMORY", "NODE_FAIL", "TIMEOUT"):
            return step.state
    if any("slurmstepd" in line and _OOM.search(line) for line in output.splitlines()):
        return "OUT_OF_MEMORY"
    for match in _STEP.finditer(output):
        if match["node"]:
            return "NODE_FAIL"
        for words, state in _DUE.items():
            if f"DUE TO {words}" in match["what"]:
                return state
    return record.state


def _describe_exit(record: JobRecord, output: str) -> str:
    if record.exitcode in _ENDED_BY_SRUN:  # srun reports the highest code, which is that of tasks that it ended itself
        for match in _TASK.finditer(output):
            code = re.fullmatch(r"Exited with exit code (\d+)", match["what"].strip())
            if code is not None and int(code[1]) not in _ENDED_BY_SRUN:
                return f"exit code {code[1]} of task {match['tasks']}, after which srun ended the others"
    if record.exit_signal:
        return f"it was killed by {_signal_name(record.exit_signal)}"
    if record.exitcode > 128 and _signal_name(record.exitcode - 128).startswith("SIG"):
        return f"exit code {record.exitcode}, {_signal_name(record.exitcode - 128)}"
    return f"exit code {record.exitcode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_failure(output: str, failure: str) -> list[str]:
    """The first error in time: the rank's note, else the first traceback of the output."""
    if failure.strip():
        return [f"first failure: {line}" for line in failure.strip().splitlines()[-1:]]
    traced: set[str] = set()
    for line in output.splitlines():
        label = _LABEL.match(line)
        rank, text = (label["rank"], label["text"]) if label else ("", line)
        if text.startswith("Traceback (most recent call last)"):
            traced.add(rank)
        elif rank in traced and _ERROR_LINE.match(text):
            where = f"task {rank}: " if rank else ""
            return [f"first error in the output: {where}{text.strip()[:200]}"]
    return []


def _slurm_lines(output: str) -> list[str]:
    """What srun and the nodes' daemons wrote about the end, at most three lines."""
    found = []
    for line in output.splitlines():
        if (match := _TASK.search(line)) and not _ENDED.search(match["what"]):
            found.append(f"task {match['tasks']} on {match['nodes']}: {match['what'].lower()}")
        elif (match := _STEP.search(line)) and (match["node"] or "DUE TO" in match["what"]):
            found.append(match["node"] or match["what"])
        elif "slurmstepd" in line and _OOM.search(line):
            found.append(line.partition("error: ")[2] or line)
    return list(dict.fromkeys(found))[:3]


def _memory_lines(state: str, record: JobRecord, steps: Sequence[JobRecord]) -> list[str]:
    if state != "OUT_OF_MEMORY":
        return []
    return [
        f"step {each.job_id} used {each.memory} at most; asked for was {record.memory or 'the default'}"
        for each in steps
        if each.memory
    ]
