# SPDX-License-Identifier: Apache-2.0
"""Why a job ended, in a few lines: from Slurm's records, the job's output, and what its ranks have noted."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpilot.launching.exception_report import reads_like_victim
from ddpilot.launching.rank_environment import EXIT_REQUEUE
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
    "UNKNOWN": "Slurm has forgotten how, and the site keeps no accounts",
}
_SAVED_AT = {"SIGUSR1": "SIGUSR1, which comes before the time limit", "time": "`max_time_s`"}
_FULL = "make room there; what its ranks wrote at the end is lost, and checkpoints before it are kept"
_KILLED = "the kernel's out-of-memory killer is the usual cause: look at `dmesg` on that node"

_OOM = re.compile(r"oom[-_]kill|Out Of Memory|oom killer", re.I)
_TASK = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)")
_STEP = re.compile(
    r"(?:slurmstepd\S*|srun): error: \*\*\* (?P<what>.+) \*\*\*|srun: error: (?P<node>Node failure on .+)"
)
_CANCELLED_STEP = re.compile(r"\*\*\* STEP (?P<step>\S+) ON \S+ CANCELLED AT \S+ \*\*\*")
_STEP_ENDS = re.compile(
    r"\*\*\* STEP \S+ ON \S+ CANCELLED AT |srun: (Job step aborted|forcing job termination)|_step_signal"
)
"""Lines after which srun and slurmd end the tasks that still run."""
_CODE = re.compile(r"Exited with exit code (\d+)")
_ENDED_BY_SRUN = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_DUE = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}
_TERMINATED = "a preemption does so, which sacct does not record"
_LABEL = re.compile(r"^(?P<rank>\d+): (?P<text>.*)$")
_RANK = re.compile(r"^\[rank\d+\]: ")
_ERROR_LINE = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Failure)\b)(: (?P<message>.*))?"
)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_RUN_FAILED = re.compile(r"^(\d+: )?ddpilot: (?P<what>rank \d+ .+) \(running `.*` on \d+ ranks? on (?P<host>\S+)\)$")
"""The line of `ddpilot run` on the node whose rank failed first."""
_NO_OUTPUT_SIGNAL = 53
"""What Slurm reports of a job script whose output or folder it cannot open, though no such signal was sent."""
_NOT_FOUND_CODE = 127
_NOT_STARTED = re.compile(r"^(\d+: )?(?P<what>FATAL: .+|\S.*: (command )?not found|srun: unrecognized option .+)$")
"""Lines of a shell, of Apptainer and of srun about a program that they could not start."""
_NOT_FOUND = "give what the nodes need by `--modules`, `--venv` or `--conda`, or the interpreter's path by `--python`"
_STARTS_AGAIN = re.compile(r"^job [\d_]+ starts again on .*$", re.MULTILINE)
_SCRIPT_REQUEUES = re.compile(r"^exit code (?P<code>\d+): job [\d_]+ is requeued$", re.MULTILINE)


@dataclass(frozen=True)
class ExitSummary:
    """`cause`: one line; `details`: lines of evidence, the first failure in time first; `advice`: what to do, or ""."""

    cause: str
    details: tuple[str, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        lines = [self.cause, *(f"  {line}" for line in self.details)]
        return "\n".join([*lines, *([f"  what to do: {self.advice}"] if self.advice else [])])


@dataclass(frozen=True)
class _TaskEnd:
    """A line of srun about tasks that have failed. `is_first`: nothing had ended the step before."""

    tasks: str
    nodes: str
    what: str
    is_first: bool

    @property
    def code(self) -> int | None:
        found = _CODE.fullmatch(self.what)
        return int(found[1]) if found else None

    @property
    def is_killed(self) -> bool:
        return self.what == "Killed" or self.code == 128 + signal.SIGKILL

    @property
    def may_be_ended(self) -> bool:
        """True if srun may have ended these tasks itself."""
        return self.what in ("Killed", "Terminated") or self.code in _ENDED_BY_SRUN


def summarize_exit(
    record: JobRecord,
    *,
    steps: Sequence[JobRecord] = (),
    output: str = "",
    failure: str = "",
    lost_nodes: Mapping[str, str] | None = None,
    full_folder: str = "",
) -> ExitSummary:
    """Return why the job of `record` ended.

    `steps`: records of its steps, by sacct; `output`: the end of its output; `failure`: the note of the rank that
    failed first, if the job script asked for one; `lost_nodes`: Slurm's reason by name of each of its nodes that is
    down; `full_folder`: the folder of its output if that has no room left.
    """
    output, lost = of_last_start(output), lost_nodes or {}
    state = _effective_state(record, steps, output)
    after = f" after {record.run_time}" if record.run_time else ""
    restarts = f", requeued {record.num_restarts}x before" if record.num_restarts else ""
    shown = state if state == record.state else f"{record.state}, {state}"
    head = f"job {record.job_id} ended{after} ({shown}{restarts})"
    if state == "COMPLETED":
        return ExitSummary(f"job {record.job_id} completed{after}{restarts}")
    cause = _state_cause(state, record, lost) or _describe_exit(record, steps, output)
    first = _first_failure(output, failure) or _not_started_lines(output)
    details = [*first, *_slurm_lines(output), *_memory_lines(state, record, steps)]
    details += [f"it ran on {record.nodes}"] if record.nodes else []
    advice = _ADVICE.get(state, "")
    if full_folder:
        details.insert(0, f"no space is left in {full_folder}, where its output is")
        advice = advice or _FULL
    elif record.exit_signal == _NO_OUTPUT_SIGNAL:
        advice = "make its folder first, or name one that all nodes share; Slurm makes none"
    elif not advice and record.exitcode == _NOT_FOUND_CODE:
        advice = _NOT_FOUND
    elif not advice and any(end.is_first and end.is_killed for end in _task_ends(output)):
        advice = _KILLED
    return ExitSummary(f"{head}: {cause}", tuple(dict.fromkeys(details)), advice)


def summarize_requeue(
    before: JobRecord, *, output: str = "", failure: str = "", lost_nodes: Mapping[str, str] | None = None
) -> ExitSummary:
    """Return why a job was requeued; `before`: its last record while it ran. The rest as for `summarize_exit`."""
    output, lost = of_last_start(output), lost_nodes or {}
    where = f" on {before.nodes}" if before.nodes else ""
    head = f"job {before.job_id} was requeued{f' after {before.run_time}' if before.run_time else ''}{where}"
    state = "NODE_FAIL" if lost else "PREEMPTED" if before.preempted else _state_in_output(output)
    script = _SCRIPT_REQUEUES.search(output)
    if script is None:
        cause = _state_cause(state, before, lost) or "by `scontrol requeue`, or by an administrator"
        details = _slurm_lines(output)
    elif int(script["code"]) == EXIT_REQUEUE:
        cause = f"its ranks saved a checkpoint and exited with code {EXIT_REQUEUE}{_reason_of_save(output)}"
        details = []
    else:
        cause = f"exit code {script['code']}, which is tried once more"
        details = [*_first_failure(output, failure), *_slurm_lines(output)]
    return ExitSummary(f"{head}: {cause}", tuple(details))


def of_last_start(output: str) -> str:
    """The part of a job's output that it has written since it was requeued last."""
    starts = list(_STARTS_AGAIN.finditer(output))
    return output[starts[-1].end() :] if starts else output


def _reason_of_save(output: str) -> str:
    found = re.search(r"ddpilot: (?P<name>SIG\w+|time): the checkpoint in", output)
    words = _SAVED_AT.get(found["name"], found["name"]) if found else ""
    return f" after {words}" if words else ""


def _state_cause(state: str, record: JobRecord, lost_nodes: Mapping[str, str]) -> str:
    """The cause in a state of Slurm's, "" if the state does not name one."""
    if state == "NODE_FAIL" and lost_nodes:
        reasons = [f"{node} failed{f' ({reason})' if reason else ''}" for node, reason in lost_nodes.items()]
        return f"node {', node '.join(reasons)}"
    return _CAUSES.get(state, "").format(limit=f" of {record.time_limit}" if record.time_limit else "")


def _effective_state(record: JobRecord, steps: Sequence[JobRecord], output: str) -> str:
    """The state that names the cause: a step's, or that of the output, where the job's own is FAILED or CANCELLED."""
    if record.state not in ("FAILED", "CANCELLED"):
        return record.state
    if record.preempted:
        return "PREEMPTED"
    for step in steps:
        if step.state in ("OUT_OF_MEMORY", "NODE_FAIL", "TIMEOUT"):
            return step.state
    return _state_in_output(output) or record.state


def _state_in_output(output: str) -> str:
    """The state that lines of srun and the nodes' daemons name; "" if they name none."""
    if any("slurmstepd" in line and _OOM.search(line) for line in output.splitlines()):
        return "OUT_OF_MEMORY"
    for match in _STEP.finditer(output):
        if match["node"]:
            return "NODE_FAIL"
        for words, state in _DUE.items():
            if f"DUE TO {words}" in match["what"]:
                return state
    return ""


def _task_ends(output: str) -> Iterator[_TaskEnd]:
    """What srun reports about failed tasks, in time."""
    has_ended = False
    for line in output.splitlines():
        if match := _TASK.search(line):
            yield _TaskEnd(match["tasks"], match["nodes"], match["what"].strip(), not has_ended)
        elif _STEP_ENDS.search(line):
            has_ended = True


def _describe_exit(record: JobRecord, steps: Sequence[JobRecord], output: str) -> str:
    ends = list(_task_ends(output))
    first = next((end for end in ends if end.is_first), None)
    if step_id := _find_terminated_step(record, steps):
        return f"Slurm sent SIGTERM to step {step_id}, which no user had cancelled: {_TERMINATED}"
    if first is None and (step := _CANCELLED_STEP.search(output)):
        return f"step {step['step']} was cancelled, as `scancel {step['step']}` does"
    if first is not None and first.is_killed:
        return f"task {first.tasks} on {first.nodes} was killed by SIGKILL, after which srun ended the others"
    if record.exitcode in _ENDED_BY_SRUN:  # srun reports the highest code, which is that of tasks that it ended itself
        cause = next((end for end in ends if end.code is not None and not end.may_be_ended), None)
        if cause is not None:
            return f"exit code {cause.code} of task {cause.tasks}, after which srun ended the others"
    if not ends and (words := _describe_step(record, steps)):
        return words
    if record.exit_signal == _NO_OUTPUT_SIGNAL:
        return f"its output file could not be opened on the node: {record.output or 'see --output'}"
    if record.exit_signal:
        return f"it was killed by {_signal_name(record.exit_signal)}"
    if record.exitcode > 128 and _signal_name(record.exitcode - 128).startswith("SIG"):
        return f"exit code {record.exitcode}, {_signal_name(record.exitcode - 128)}"
    if record.exitcode == _NOT_FOUND_CODE:
        return f"exit code {record.exitcode}, a command was not found"
    return f"exit code {record.exitcode}"


def _find_terminated_step(record: JobRecord, steps: Sequence[JobRecord]) -> str:
    """Number of a step that Slurm has terminated for a reason that only slurmctld knew, which has forgotten the job."""
    ended = (
        step.job_id
        for step in steps
        if (step.state, step.exit_signal, step.cancelled_by) == ("CANCELLED", signal.SIGTERM, "")
    )
    return next(ended, "") if record.is_accounted else ""


def _describe_step(record: JobRecord, steps: Sequence[JobRecord]) -> str:
    """How the last step of the ranks ended, if the job's own exit code does not tell; "" otherwise."""
    failed = [step for step in steps if step.job_id.rpartition(".")[2].isdecimal() and step.state != "COMPLETED"]
    if failed and failed[-1].exit_signal:
        return f"step {failed[-1].job_id} was ended by {_signal_name(failed[-1].exit_signal)}"
    if failed and failed[-1].exitcode not in (0, record.exitcode):
        return f"exit code {failed[-1].exitcode} of step {failed[-1].job_id}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_failure(output: str, failure: str) -> list[str]:
    """The first error in time: the rank's note, else the first traceback of the output that has a cause of its own."""
    if failure.strip():
        return [f"first failure: {line}" for line in failure.strip().splitlines()[-1:]]
    if found := next(filter(None, map(_RUN_FAILED.match, output.splitlines())), None):
        return [f"first failure: on {found['host']}: {found['what'][:200]}"]
    for rank, error in _errors(output):
        message = error["message"] or ""
        if not reads_like_victim(error["kind"].rpartition(".")[2], message):
            return [f"first error in the output: {f'task {rank}: ' if rank else ''}{error[0].strip()[:200]}"]
    return []


def _not_started_lines(output: str) -> list[str]:
    """Why the program could not be started, if the shell, Apptainer or srun wrote it: the first such line."""
    return [found["what"][:200] for line in output.splitlines() if (found := _NOT_STARTED.match(line))][:1]


def _errors(output: str) -> list[tuple[str, re.Match[str]]]:
    """Task ("" without labels) and last line of each traceback in the output; of chained ones, of the last."""
    traced: set[str] = set()
    chained: set[str] = set()
    found: list[tuple[str, re.Match[str]]] = []
    last: dict[str, tuple[str, re.Match[str]]] = {}
    for line in output.splitlines():
        label = _LABEL.match(line)
        rank, text = (label["rank"], label["text"]) if label else ("", line)
        text = _RANK.sub("", text)
        if text.startswith("Traceback (most recent call last)"):
            traced.add(rank)
        elif rank in traced and (error := _ERROR_LINE.match(text)):
            traced.discard(rank)
            if rank in chained:
                found.remove(last[rank])
            chained.discard(rank)
            last[rank] = (rank, error)
            found.append(last[rank])
        elif text.startswith(_CHAINED) and rank in last:
            chained.add(rank)
    return found


def _slurm_lines(output: str) -> list[str]:
    """What srun and the nodes' daemons wrote about the end, at most three lines."""
    found = [
        f"task {end.tasks} on {end.nodes}: {end.what.lower()}"
        for end in _task_ends(output)
        if end.is_first or not end.may_be_ended
    ]
    for line in output.splitlines():
        if (match := _STEP.search(line)) and (match["node"] or "DUE TO" in match["what"]):
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
        if each.memory.strip("0KMGT.")  # Slurm looks at it twice a minute: 0 of a step that ended before
    ]
