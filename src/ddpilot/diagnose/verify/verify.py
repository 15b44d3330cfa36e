# SPDX-License-Identifier: Apache-2.0
"""`verify`: run a program on one rank and on several, and say whether and why their numbers or results differ."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from ddpilot.diagnose.updates.record import Update
from ddpilot.diagnose.verify.causes import (
    find_length_fault,
    find_number_fault,
    find_rank_fault,
    find_sample_fault,
    find_start_fault,
    line_at,
)
from ddpilot.diagnose.verify.differences import compare_runs, count_samples, largest, same_states
from ddpilot.diagnose.verify.result import UpdateRow, Verdict, Verification
from ddpilot.diagnose.verify.runs import EXACT, Runs, largest_of
from ddpilot.diagnose.verify.target import Run, Runner, find_program
from ddpilot.environments.detect import detect_topology
from ddpilot.environments.nvml import count_accelerators
from ddpilot.environments.private_files import scratch_folder
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.order import CAUSES, sort_findings
from ddpilot.user_files import CodeLine

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(
    r"(?i)(time|seconds?|elapsed|eta|speed|throughput|memory|per.sec|took|duration)\w*[^\w,;|]{0,6}$"
)
"""Names of numbers that depend on the machine, in front of a number, or at the end of its name."""
_UNIT = re.compile(r"\s?(s|ms|us|sec|secs|seconds?|min|it/s|/s|[kMG]i?B)\b")
_GROWTH = 100.0
"""How much larger than the effect of rounding on a parameter its effect on a metric may be."""
_LEAST = 1e-4
_MAX_NAMED = 5


def find_result_fault(runs: Runs) -> Finding | None:
    """Return a finding if a returned or printed number depends on the number of ranks, and the training does not."""
    if runs.single.values and runs.parallel.values:
        return _find_returned(runs)
    one, all_, again = (run.output for run in (runs.single, runs.parallel, runs.repeated))
    changed = list(compare_lines(one, all_, again, _LEAST, own_losses(runs.parallel, 0)))
    changed = changed and list(compare_lines(one, all_, again, _limit(runs), own_losses(runs.parallel, 0)))
    if not changed:
        return None
    return make_finding(
        "DDP825",
        summary=f"rank 0 prints other numbers on {runs.nproc_per_node} ranks than on one",
        evidence=[f"1 rank: {one}; rank 0 of {runs.nproc_per_node}: {other}" for one, other in changed[:_MAX_NAMED]],
    )


def _limit(runs: Runs) -> float:
    """Return the relative difference that rounding explains; measured by another run."""
    return max(_LEAST, _GROWTH * runs.noise)


def _find_returned(runs: Runs) -> Finding | None:
    expected = dict(_numbers_in(runs.single.values[0]))
    again = dict(_numbers_in(runs.repeated.values[0])) if runs.repeated.values else {}
    changed = []
    for rank, value in enumerate(runs.parallel.values):
        losses = own_losses(runs.parallel, rank)
        for name, number in _numbers_in(value):
            if name not in expected or _is_close(expected[name], number, _LEAST) or _MEASURED.search(name):
                continue
            is_own = any(_is_close(number, loss, _LEAST) for loss in losses)
            if is_own or not _is_close(expected[name], again.get(name, expected[name]), _LEAST):
                continue
            if not _is_close(expected[name], number, _limit(runs)):
                changed.append(
                    (rank, f"{name or 'the value'}: {expected[name]:.6g} on 1 rank, {number:.6g} on rank {rank}")
                )
    if not changed:
        return None
    return make_finding(
        "DDP825",
        summary=f"the function returns other numbers on {runs.nproc_per_node} ranks than on one",
        ranks=sorted({rank for rank, _ in changed}),
        evidence=[text for _, text in changed[:_MAX_NAMED]],
    )


def _numbers_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floating point numbers in nested containers with a name such as ``history[0].loss``."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers_in(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _numbers_in(each, f"{name}[{number}]")


def _is_close(one: float, other: float, limit: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= max(limit * max(abs(one), abs(other)), EXACT)


def own_losses(run: Run, rank: int) -> list[float]:
    """Return the losses that `rank` has computed in training, and their means since the start."""
    losses = [loss for update in run.ranks[rank].updates for loss in update.losses]
    return [*losses, *(sum(losses[:num]) / num for num in range(2, len(losses) + 1))]


def compare_lines(
    one: tuple[str, ...], other: tuple[str, ...], again: tuple[str, ...], limit: float, losses: list[float]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of lines that are alike but for numbers with a decimal point, of which one differs.

    `again`: the lines of `one` in a second run; what differs in them, such as a time, is not compared. Nor are numbers
    of `other` that are in `losses`, and those that are named as a time, a speed or a size of memory.
    """
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if not _are_alike(left, right):
            continue
        same = again[number] if number < len(again) and _are_alike(left, again[number]) else left
        for first, second, third in zip(*map(_NUMBER.finditer, (left, right, same)), strict=True):
            is_measured = _MEASURED.search(left[max(0, first.start() - 30) : first.start()]) or _UNIT.match(
                left, first.end()
            )
            is_own = any(_are_printed_alike(second[0], loss, _LEAST) for loss in losses)
            if is_measured or is_own or not _are_printed_alike(first[0], float(third[0]), _LEAST):
                continue
            if not _are_printed_alike(first[0], float(second[0]), limit):
                yield left.strip(), right.strip()
                break


def _are_alike(left: str, right: str) -> bool:
    return _NUMBER.sub("#", left) == _NUMBER.sub("#", right)


def _are_printed_alike(text: str, other: float, limit: float) -> bool:
    """True if `other` is the number `text`, up to two units of its last place."""
    digits, _, exponent = text.lower().partition("e")
    last_place = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return _is_close(float(text), other, limit) or abs(float(text) - other) <= 2 * last_place


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
    program = find_program(fn, args, kwargs)
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
    place = line_at(runs.single.ranks[0].updates[0].site)
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
        place = line_at(one[0].site)
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
