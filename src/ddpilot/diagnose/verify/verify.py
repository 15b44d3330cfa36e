# SPDX-License-Identifier: Apache-2.0
"""`verify`: run a program on one rank and on several, and say whether and why their numbers differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from ddpilot.diagnose.updates.record import Update
from ddpilot.diagnose.verify.causes import (
    find_length_fault,
    find_number_fault,
    find_rank_fault,
    find_sample_fault,
    find_start_fault,
    line_of,
)
from ddpilot.diagnose.verify.differences import compare_runs, count_samples, largest, same_states
from ddpilot.diagnose.verify.result import UpdateRow, Verdict, Verification
from ddpilot.diagnose.verify.results import find_result_fault
from ddpilot.diagnose.verify.runs import EXACT, Runs, largest_of
from ddpilot.diagnose.verify.target import Program, Run, Runner, find_program, name_of
from ddpilot.environments.detect import detect_topology
from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.order import CAUSES, sort_findings
from ddpilot.user_files import CodeLine

_NUM_ON_CPU = 2
_DIFFERENT = {"DDP407"}
"""Findings of guard, which are no errors, about something that one rank never does: the same dropout masks twice."""


def verify(
    fn: Callable[..., Any] | str,
    /,
    *args: Any,
    nproc_per_node: int | None = None,
    num_updates: int | None = 5,
    timeout_s: float = 600.0,
    show: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Verification:
    """Run `fn(*args, **kwargs)` on one rank and on several of this machine, and compare what their updates compute.

    For each of the first `num_updates` steps of the optimizers, it compares the samples, the gradients and parameters
    by name, and the options of the optimizer. It also compares the values that `fn` returns. A difference is reported
    with its size, the finding that explains it, and whether rounding explains it. For this, the same run is repeated,
    gradients are changed in their last place, or float64 is used. Takes 3 to 9 runs of `fn`, one after another.

    - `fn`: a function, the path of a script as text (`args` are words of its command line), or ``train.py:train``. On
      each rank it runs as with `launch` or ``ddpilot run``: it enters a process group and divides its data itself, or
      leaves that to a Loop, a Trainer or a library. If the batch size is per rank (DistributedSampler), the run on one
      rank has batches as large as those of all ranks together.
    - `nproc_per_node`: number of ranks to compare with one; None: one per visible accelerator, at least 2.
    - `num_updates`: number of steps of each optimizer after which a run is ended; None: it runs to its end.
    - `timeout_s`: seconds for each run of a function.
    - `show`: called with a line about each run.

    Not collective. Raises LaunchError for an impossible number of ranks, for a file or function that does not exist,
    and in a rank. An error of the program is part of the result.
    """
    num = nproc_per_node if nproc_per_node is not None else max(_NUM_ON_CPU, count_accelerators(os.environ))
    _check(num, num_updates)
    program = (
        find_program(fn, tuple(map(str, args)))
        if isinstance(fn, str)
        else Program(name=name_of(fn), fn=fn, args=args, kwargs=kwargs)
    )
    with scratch_folder("ddpilot-verify-") as folder:
        runner = Runner(program, folder, timeout_s=timeout_s)
        runs = Runs(runner, num, num_updates, show or (lambda _: None))
        found = compare(runs, f"verify {program.name}, 1 and {num} ranks")
        if num_updates is None or not found.rows or runs.parallel.num_updates < num_updates:
            return found
        return replace(found, notes=(*found.notes, _describe_limit(num_updates)))


def _check(num: object, num_updates: object) -> None:
    if not _is_count(num) or not 2 <= num <= 1024:
        raise LaunchError("reading `nproc_per_node`", found=f"{num!r}", fix="Give a number of ranks from 2 to 1024")
    if num_updates is not None and not (_is_count(num_updates) and num_updates >= 1):
        raise LaunchError("reading `num_updates`", found=f"{num_updates!r}", fix="Give 1 or more, or None")
    topology = detect_topology(os.environ)
    if topology.is_distributed:
        raise LaunchError(
            "verifying a program",
            found=f"this process is itself a rank: {topology.how}",
            fix="Call it where ranks are launched from: it starts ranks of its own",
        )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class _Judgement(NamedTuple):
    verdict: Verdict
    summary: str
    finding: Finding | None = None
    has_numbers: bool = True
    """False if there are no runs to show numbers of."""
    details: str = ""
    seen: tuple[Finding, ...] = ()
    """Findings of the run that failed."""


def compare(runs: Runs, title: str) -> Verification:
    """Compare the runs, of which only the first has been made, and return what is found."""
    judged = _judge(runs)
    seen = judged.seen or runs.parallel.findings
    codes = {each.code for each in seen}
    ours = judged.finding
    is_explained = ours is None or bool(codes & (CAUSES.get(ours.code, frozenset()) | {ours.code}))
    both = seen if is_explained or ours is None else (ours, *seen)
    return Verification(
        title=title,
        verdict=judged.verdict,
        summary=judged.summary,
        findings=sort_findings(both),
        rows=tuple(_make_rows(runs)) if judged.has_numbers else (),
        floors=runs.floors() if judged.has_numbers else None,
        notes=tuple(runs.notes),
        details=judged.details,
    )


def _judge(runs: Runs) -> _Judgement:
    if (failed := _judge_failure(runs.parallel)) is not None:
        return failed
    runs.make_comparable()
    for run in (runs.parallel, runs.single, runs.repeated):
        if (failed := _judge_failure(run)) is not None:
            return failed
    repeated = compare_runs(runs.single, runs.repeated)
    place = line_of(runs.single.ranks[0].updates[0])
    if largest_of(repeated) > EXACT or any(largest(each, "before") > EXACT for each in repeated):
        summary = "two runs on one rank give different numbers, so that none can be compared"
        return _Judgement("unknown", summary, make_finding("DDP820", line=place))
    found = find_start_fault(runs) or _find_first_difference(runs)
    if found is None and runs.num_compared is None:
        found = find_length_fault(runs) or find_result_fault(runs)
    if runs.num_compared == 0:
        return _Judgement("unknown", runs.notes[-1])
    if found is not None:
        return _judge_finding(runs, found)
    return _judge_equal(runs, place)


def _judge_finding(runs: Runs, found: Finding) -> _Judgement:
    """Return "different"; "unknown" if the finding may come from how the runs were made comparable."""
    if not runs.is_same_size and found.code == "DDP822":
        why = "the program makes its batches itself, of the same size at any number of ranks: an update of one rank has"
        return _Judgement("unknown", f"{why} fewer samples, so that numbers cannot be compared")
    if found.code == "DDP826" and runs.draws:
        return _Judgement("unknown", *_describe_draws(runs, found))
    if found.code in ("DDP824", "DDP826") and runs.single.spec.takes_turns:
        why = "one rank that takes the ranks' batches in turn gives other numbers, for a reason that is not known"
        return _Judgement("unknown", why, found)
    return _Judgement("different", found.summary, found)


def _describe_draws(runs: Runs, found: Finding) -> tuple[str, Finding]:
    names = ", ".join(sorted(runs.draws))
    summary = f"random numbers of {names} that the program draws in training depend on how batches are divided"
    finding = make_finding("DDP827", summary=summary, line=found.place, evidence=found.evidence)
    return summary, finding


def _judge_equal(runs: Runs, place: CodeLine | None) -> _Judgement:
    """Return "equal"; "different" if something was seen in the program as it is that the compared runs do not have."""
    differences = runs.differences()
    size = largest_of(differences)
    how = "exactly equal" if size == 0 else f"equal up to {size:.1e} of the largest element, which is rounding"
    summary = f"{len(differences)} updates of 1 and {runs.nproc_per_node} ranks are {how}"
    for seen in runs.parallel.findings:
        if seen.severity == "error" or seen.code in _DIFFERENT:
            return _Judgement("different", f"{seen.summary}; otherwise {summary}")
    runs.notes += _describe_losses(runs)
    note = make_finding("DDP414", line=place) if runs.single.spec.replicas > 1 else None
    return _Judgement("equal", summary, note)


def _describe_limit(num_updates: int) -> str:
    first = f"the first {num_updates} updates were" if num_updates > 1 else "the first update was"
    return f"{first} compared; `--updates N` (`num_updates=`) compares more, 0 (None) all"


def _describe_losses(runs: Runs) -> list[str]:
    """Return a line if losses differ although gradients agree: a term without gradient, or a factor of its own."""
    for row in _make_rows(runs):
        one, all_ = row.losses
        if one is None or all_ is None or abs(one - all_) <= 1e-3 * max(abs(one), abs(all_)):
            continue
        several = f"{all_:.6g} is the mean of the losses of {runs.nproc_per_node} ranks"
        return [f"gradients agree, but the loss of update {row.update} is {one:.6g} on 1 rank, and {several}"]
    return []


def _find_first_difference(runs: Runs) -> Finding | None:
    differences = compare_runs(runs.single, runs.parallel)
    for update, found in enumerate(differences):
        if runs.stop_at_padding(update):
            return None
        finding = find_sample_fault(runs, update) or find_rank_fault(runs, update)
        if finding is not None:
            return finding
        if not runs.is_rounding(differences, update + 1):
            return find_number_fault(runs, update, found)
    return None


def _judge_failure(run: Run) -> _Judgement | None:
    """Return why a run cannot be compared; None if it can."""
    where = f"{run.nproc_per_node} rank{'s' * (run.nproc_per_node > 1)}"
    if run.error is not None:
        first, _, rest = str(run.error).partition("\n")
        summary = f"the run on {where} failed: {first.strip()}"
        return _Judgement("unknown", summary, has_numbers=False, details=rest.strip("\n"), seen=run.findings)
    if any(record.has_fault for record in run.ranks):
        return _Judgement("unknown", f"the updates on {where} could not be recorded", has_numbers=False)
    if not run.num_updates:
        summary = f"on {where} no optimizer stepped, so that there is nothing to compare"
        return _Judgement("unknown", summary, has_numbers=False, seen=run.findings)
    return None


def _mean_loss(updates: Sequence[Update], num_samples: Sequence[int]) -> float | None:
    """Return the mean of the ranks' losses, by their numbers of samples where these are known; None without losses."""
    known = [(sum(each.losses), num) for each, num in zip(updates, num_samples, strict=True) if each.losses]
    total = sum(num for _, num in known)
    if total:
        return sum(loss * num for loss, num in known) / total
    return sum(loss for loss, _ in known) / len(known) if known else None


def _make_rows(runs: Runs) -> list[UpdateRow]:
    rows = []
    for update, found in enumerate(runs.differences()):
        one, all_ = (
            [record.updates[update] for record in each.ranks if len(record.updates) > update]
            for each in (runs.single, runs.parallel)
        )
        counted = count_samples(runs.parallel, update)
        place = line_of(one[0])
        rows.append(
            UpdateRow(
                update=update + 1,
                site=str(place or ""),
                num_samples=(count_samples(runs.single, update).total, counted.total),
                losses=(sum(one[0].losses) if one[0].losses else None, _mean_loss(all_, counted.by_rank)),
                gradient=largest(found, "gradient"),
                parameter=largest(found, "after"),
                same_states=same_states(runs.parallel, update),
            )
        )
    return rows
