# SPDX-License-Identifier: Apache-2.0
"""`check_program`: take a program from one process to several ranks, rung by rung, and stop where it goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.doctor import doctor
from ddpilot.diagnose.ladder.checklist import Evidence, make_checklist
from ddpilot.diagnose.ladder.failures import label_place
from ddpilot.diagnose.ladder.result import RUNGS, ProgramDiagnosis, Rung, complete
from ddpilot.diagnose.ladder.rungs import (
    describe_misplaced,
    is_wrong,
    judge_alone,
    judge_communication,
    judge_first_backward,
    judge_first_batch,
    judge_group,
    judge_machine,
    judge_same_numbers,
)
from ddpilot.diagnose.ladder.sources import read_sources
from ddpilot.diagnose.updates.record import RecordSpec
from ddpilot.diagnose.verify.runs import Runs
from ddpilot.diagnose.verify.target import Program, Run, Runner, find_program
from ddpilot.diagnose.verify.verify import compare
from ddpilot.environments.detect import detect_topology
from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError
from ddpilot.findings.finding import Finding

_NUM_ON_CPU = 2
_MAX_RANKS = 1024


def check_program(
    fn: Callable[..., Any] | str,
    /,
    *args: Any,
    nproc_per_node: int | None = None,
    num_updates: int = 5,
    timeout_s: float = 600.0,
    num_workers: int | None = None,
    checkpoint_dir: str | Path = ".",
    show: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> ProgramDiagnosis:
    """Check a program step by step, from one process to several ranks of this machine; stop at the first fault.

    The steps are called rungs:

    - a: `num_updates` optimizer steps as one process;
    - b: environment and machine, as `doctor`;
    - c: the ranks form a group, and its collectives return right values;
    - d: all tensors of the first batch are on the device of their rank;
    - e: after the first backward pass the ranks have the same gradients, from different samples;
    - f: the same steps on all ranks agree with one process, as `verify`;
    - g: the share of an update that is spent in communication.

    The set-up checklist follows: each point is ok, wrong (with its line) or not seen, by `ddpilot lint` and the runs
    together.

    - `fn`: a function, the path of a script as text (`args` are words of its command line), or ``train.py:train``. It
      is not changed. It runs up to its first updates, several times, and everything that it does until then, such as
      writing files, happens each time.
    - `nproc_per_node`: number of ranks; None: one per visible accelerator, at least 2.
    - `timeout_s`: seconds for each run of a function.
    - `num_workers`, `checkpoint_dir`: as for `doctor`.
    - `show`: called with a line about each run.

    Not collective. Raises LaunchError for impossible counts, for a file or function that does not exist, and in a rank.
    """
    num = nproc_per_node if nproc_per_node is not None else max(_NUM_ON_CPU, count_accelerators(os.environ))
    _check_counts(num, num_updates)
    program = find_program(fn, args, kwargs)
    with scratch_folder("ddpilot-doctor-") as folder:
        runner = _ReusingRunner(program, folder, timeout_s=timeout_s, show=show or (lambda _: None))
        machine = {"num_workers": num_workers, "checkpoint_dir": checkpoint_dir}
        return _Ladder(program, runner, num, num_updates, machine).climb()


def _check_counts(num: object, num_updates: object) -> None:
    for name, value, least, most in (
        ("nproc_per_node", num, 2, _MAX_RANKS),
        ("num_updates", num_updates, 1, None),
    ):
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count or value < least or (most is not None and value > most):  # type: ignore[operator]
            limit = f"from {least} to {most}" if most is not None else f"of {least} or more"
            raise LaunchError(f"reading `{name}`", found=f"{value!r}", fix=f"Give a number {limit}")
    topology = detect_topology(os.environ)
    if topology.is_distributed:
        raise LaunchError(
            "checking a program",
            found=f"this process is itself a rank: {topology.how}",
            fix="Call it where ranks are launched from: it starts ranks of its own",
        )


class _ReusingRunner(Runner):
    """Runs a program; a run that was kept is returned once instead of running the same again."""

    def __init__(self, program: Program, folder: Path, *, timeout_s: float, show: Callable[[str], None]) -> None:
        super().__init__(program, folder, timeout_s=timeout_s)
        self.show = show
        self._announced = ""
        self._kept: list[Run] = []

    def announce(self, text: str) -> None:
        """Show `text` if the next run is made."""
        self._announced = text

    def keep(self, run: Run) -> None:
        """Return `run` when a run with the same number of ranks and specification is asked for the next time."""
        self._kept.append(run)

    def run(self, nproc_per_node: int, spec: RecordSpec) -> Run:
        """Return a kept run, or run the program."""
        for kept in self._kept:
            if kept.nproc_per_node == nproc_per_node and kept.spec == spec:
                self._kept.remove(kept)
                return kept
        self.show(self._announced)
        return super().run(nproc_per_node, spec)


class _Ladder:
    """One program on its way; `climb` returns what was found."""

    def __init__(
        self, program: Program, runner: _ReusingRunner, num: int, num_updates: int, machine: dict[str, Any]
    ) -> None:
        self._program = program
        self._runner = runner
        self._num = num
        self._num_updates = num_updates
        self._machine = machine
        self._rungs: list[Rung] = []
        self._run: Run | None = None
        self._notes: list[str] = []
        self._findings: list[Finding] = []

    def climb(self) -> ProgramDiagnosis:
        """Climb until a rung is wrong."""
        self._climb()
        findings = [*(each for rung in self._rungs for each in rung.findings), *self._findings]
        evidence = Evidence(
            sources=read_sources(self._program),
            rungs=self._rungs,
            run=self._run,
            findings=tuple(dict.fromkeys(findings)),
        )
        return ProgramDiagnosis(
            title=f"doctor {self._program.name}, {self._num} ranks",
            rungs=complete(self._rungs),
            checklist=make_checklist(evidence),
            notes=tuple(self._notes),
        )

    def _climb(self) -> None:
        self._runner.announce("run 1: 1 rank, as it is")
        alone = self._run = self._runner.run(1, RecordSpec(num_updates=self._num_updates))
        if not self._is_ok(_judge_alone(alone)):
            return
        self._runner.keep(alone)
        self._runner.show(f"machine: {self._num} ranks that form a group")
        lines = doctor(nproc_per_node=self._num, **self._machine).lines
        if self._is_ok(judge_machine(lines)) and self._is_ok(judge_group(lines)):
            self._climb_with_ranks(lines)

    def _climb_with_ranks(self, lines: tuple[Line, ...]) -> None:
        runs = Runs(self._runner, self._num, self._num_updates, self._runner.announce)
        self._run = run = runs.parallel
        self._findings += map(label_place, run.findings)
        if not (self._is_ok(judge_first_batch(run)) and self._is_ok(judge_first_backward(runs))):
            return
        verification = compare(runs, "")
        self._notes += verification.notes
        if self._is_ok(judge_same_numbers(verification, run)):
            self._is_ok(judge_communication(run, lines))

    def _is_ok(self, rung: Rung) -> bool:
        assert rung.letter == list(RUNGS)[len(self._rungs)]
        self._rungs.append(replace(rung, findings=tuple(map(label_place, rung.findings))))
        return rung.status == "ok"


def _judge_alone(run: Run) -> Rung:
    """Judge (a); a run that failed with tensors on the wrong device is explained by these."""
    record = run.ranks[0]
    wrong = [(record, each) for each in record.program.misplaced if is_wrong(record, each)]
    if run.error is None or not wrong:
        return judge_alone(run)
    finding = describe_misplaced(run, wrong)
    return Rung(letter="a", status="wrong", evidence=finding.summary, findings=(finding,))
