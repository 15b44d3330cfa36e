# SPDX-License-Identifier: Apache-2.0
"""Judge each rung from the runs and the checks of the machine: one function for each, which returns its `Rung`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ddpilot.diagnose.diagnosis import Line
from ddpilot.diagnose.ladder.failures import explain_failure
from ddpilot.diagnose.ladder.result import Rung
from ddpilot.diagnose.updates.record import KINDS, Misplaced, RankRecord
from ddpilot.diagnose.verify.causes import find_rank_fault, find_start_fault, line_at
from ddpilot.diagnose.verify.differences import are_same_batches, are_same_inputs, count_samples
from ddpilot.diagnose.verify.result import Verification
from ddpilot.diagnose.verify.runs import Runs
from ddpilot.diagnose.verify.target import Run
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks

_MAX_NAMED = 12
_IN_GROUP = ("joined", "values")
"""Checks of the machine that are about the process group."""
_MAX_SHARE = 0.5
"""Share of an update that may pass in exchanges that no computation hides."""
_MIN_EXCHANGE_S = 0.05
"""Shorter exchanges are not judged: a small program shows nothing about a large one."""
_NOT_MOVED = ("input", "target", "attribute")
"""Kinds of tensors that a program may move to the device after they were seen."""


def judge_alone(run: Run) -> Rung:
    """Judge (a): the program makes its updates as one process."""
    if run.error is not None or not run.num_updates:
        evidence = "the run made no step of an optimizer" if run.error is None else "the run failed"
        return Rung(letter="a", status="wrong", evidence=evidence, findings=explain_failure(run))
    updates = run.ranks[0].updates
    losses = [update.losses[-1] for update in updates if update.losses]
    text = f"{_plural(run.num_updates, 'update')} on {run.ranks[0].program.device}"
    if losses:
        text += f"; loss {losses[0]:.4g}" + (f" to {losses[-1]:.4g}" if len(losses) > 1 else "")
    return Rung(letter="a", status="ok", evidence=text)


def judge_machine(lines: Sequence[Line]) -> Rung:
    """Judge (b): environment, topology, versions, devices, limits, network and folders."""
    mine = [line for line in lines if line.subject != "live"]
    named = {line.check: str(line.answer) for line in mine if line.status == "ok"}
    text = "; ".join(named[check] for check in ("topology", "versions") if check in named)
    return _judge_lines("b", mine, text)


def judge_group(lines: Sequence[Line]) -> Rung:
    """Judge (c): the ranks form a group, and collectives return right values."""
    mine = [line for line in lines if line.subject == "live"]
    text = "; ".join(str(line.answer) for line in mine if line.check in _IN_GROUP and line.status == "ok")
    return _judge_lines("c", mine, text)


def _judge_lines(letter: str, lines: Sequence[Line], text: str) -> Rung:
    findings = [line.answer for line in lines if isinstance(line.answer, Finding)]
    errors = tuple(each for each in findings if each.severity == "error")
    if errors:
        return Rung(letter=letter, status="wrong", evidence=errors[0].summary, findings=errors)
    codes = ", ".join(dict.fromkeys(each.code for each in findings if each.severity == "warning"))
    return Rung(letter=letter, status="ok", evidence=f"{text}; warnings: {codes}" if codes else text)


def judge_first_batch(run: Run) -> Rung:
    """Judge (d): what the first forward pass and loss use is on the device of each rank."""
    wrong = [(record, each) for record in run.ranks for each in record.program.misplaced if is_wrong(record, each)]
    if wrong:
        finding = describe_misplaced(run, wrong)
        return Rung(letter="d", status="wrong", evidence=finding.summary, findings=(finding,))
    if run.error is not None and not all(record.program.num_placed for record in run.ranks):
        text = "the run ended before the first batch of all ranks"
        return Rung(letter="d", status="wrong", evidence=text, findings=explain_failure(run))
    first = run.ranks[0].program
    counted = ", ".join(_plural(first.num_placed[kind], kind) for kind in KINDS if kind in first.num_placed)
    devices = ", ".join(dict.fromkeys(record.program.device for record in run.ranks))
    return Rung(letter="d", status="ok", evidence=f"{counted or 'no tensor was seen'}: on {devices}")


def is_wrong(record: RankRecord, each: Misplaced) -> bool:
    """Return True if a tensor must not be where it is: the program may move it, but not if it failed before it did."""
    return each.kind not in _NOT_MOVED or each.device != "cpu" or not record.updates


def describe_misplaced(run: Run, wrong: Sequence[tuple[RankRecord, Misplaced]]) -> Finding:
    """Return the finding that names each tensor that is not on its rank's device."""
    by_name: dict[tuple[str, str], list[RankRecord]] = {}
    for record, each in wrong:
        by_name.setdefault((each.name, each.device), []).append(record)
    lines = []
    for (name, device), records in by_name.items():
        ranks = [record.rank for record in records]
        expected = " and ".join(dict.fromkeys(record.program.device for record in records))
        lines.append(f"{name} is on {device} in {render_ranks(ranks)}, where {expected} computes")
    more = [f"and {len(lines) - _MAX_NAMED} more"] if len(lines) > _MAX_NAMED else []
    ranks = sorted({record.rank for record, _ in wrong})
    names = list(dict.fromkeys(name for name, _ in by_name))
    kinds = {record.program.device.partition(":")[0] for record, _ in wrong}
    is_other_rank = {each.device.partition(":")[0] for _, each in wrong} == kinds and kinds != {"cpu"}
    return make_finding(
        "DDP118" if is_other_rank else "DDP412",
        summary=f"{names[0]} is not on the device of {render_ranks(ranks)}"
        + (f", nor are {len(names) - 1} more tensors" if len(names) > 1 else ""),
        ranks=ranks,
        line=line_at(wrong[0][1].site),
        evidence=[*lines[:_MAX_NAMED], *more, *([run.error.found] if run.error is not None else [])],
        severity="error",
    )


def judge_first_backward(runs: Runs) -> Rung:
    """Judge (e): after the first backward pass all ranks have the same gradients, of other data.

    Before `Runs.make_comparable`.
    """
    run = runs.parallel
    if not run.num_updates:
        text = "the run ended before the first update of all ranks"
        return Rung(letter="e", status="wrong", evidence=text, findings=explain_failure(run))
    found = find_start_fault(runs) or _find_same_data(run) or find_rank_fault(runs, 0)
    if found is not None:
        shown = _prefer_cause(found, run.findings)
        return Rung(letter="e", status="wrong", evidence=shown[0].summary, findings=shown)
    num = len(run.ranks[0].parameters)
    text = f"gradients of {_plural(num, 'parameter')} are the same on {render_ranks(range(run.nproc_per_node))}"
    counted = count_samples(run, 0)
    if counted.total:
        text += f", of {' and '.join(map(str, counted.by_rank))} samples"
        text += f", {counted.num_repeated} of them twice" if counted.num_repeated else ", all different"
    elif any(run.ranks[0].updates[0].inputs):
        text += ", of different inputs"
    return Rung(letter="e", status="ok", evidence=text)


def _find_same_data(run: Run) -> Finding | None:
    counted = count_samples(run, 0)
    is_same = are_same_batches(run, 0) if counted.total else True
    inputs = run.ranks[0].updates[0].inputs
    if not (is_same and are_same_inputs(run, 0) and (counted.total or any(inputs))):
        return None
    by_rank = " and ".join(map(str, counted.by_rank))
    what = f"the first update has the same {by_rank} samples" if counted.total else "the models got equal inputs"
    return make_finding(
        "DDP401",
        summary=f"{render_ranks(range(run.nproc_per_node))} train on the same batch",
        ranks=range(run.nproc_per_node),
        line=line_at(run.ranks[0].updates[0].site),
        evidence=(f"{what} on all ranks",),
        severity="error",
    )


def _prefer_cause(ours: Finding, seen: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of guard that explain `ours`, if there are any."""
    is_about_gradients = ours.code in ("DDP320", "DDP324")
    related = [
        each
        for each in seen
        if each.severity == "error" and (each.code == ours.code or (is_about_gradients and each.code[:5] == "DDP32"))
    ]
    return tuple(related) or (ours,)


def judge_same_numbers(verification: Verification, run: Run) -> Rung:
    """Judge (f): several ranks compute what one computes. `run`: the one on several ranks."""
    findings = verification.findings
    if not verification.exit_status:
        return Rung(letter="f", status="ok", evidence=verification.summary, findings=findings)
    if not any(each.severity == "error" for each in findings) and verification.verdict == "unknown":
        findings = (*explain_failure(run, verification.summary), *findings)
    first = next((each.summary for each in findings if each.severity == "error"), verification.summary)
    text = verification.summary if not verification.is_equal else first
    return Rung(letter="f", status="wrong", evidence=text, findings=findings)


def judge_communication(run: Run, lines: Sequence[Line]) -> Rung:
    """Judge (g): the share of an update in which the rank that waits least exchanges gradients and computes nothing."""
    shares, waits = [], []
    for record in run.ranks:
        times = record.program.communication
        durations = [update.duration_s for update in record.updates[1:] if update.duration_s > 0]
        if "backward_comm_time" in times and durations:
            waits.append(max(0.0, times["backward_comm_time"] - times.get("backward_compute_comm_overlap_time", 0.0)))
            shares.append(min(1.0, waits[-1] / statistics.median(durations)))
    if not shares:
        text = "not measured: no DistributedDataParallel model made two updates"
        return Rung(letter="g", status="ok", evidence=text)
    place = shares.index(min(shares))
    share, wait_s = shares[place], waits[place]
    total_s = run.ranks[0].program.communication.get("backward_comm_time", 0.0)
    text = f"{share:.0%} of an update: {wait_s * 1000:.1f} ms after the backward pass"
    text += f", of {total_s * 1000:.1f} ms of exchange"
    if share <= _MAX_SHARE or wait_s < _MIN_EXCHANGE_S:
        return Rung(letter="g", status="ok", evidence=text)
    speeds = [str(line.answer) for line in lines if line.check == "all_reduce_speed"]
    by_rank = ", ".join(f"{each:.0%}" for each in shares)
    finding = make_finding(
        "DDP504",
        summary=f"the exchange of gradients takes {share:.0%} of an update",
        ranks=range(run.nproc_per_node),
        line=line_at(run.ranks[0].updates[0].site),
        evidence=(f"{by_rank} on {render_ranks(range(run.nproc_per_node))}", *speeds),
        severity="warning",
    )
    return Rung(letter="g", status="wrong", evidence=text, findings=(finding,))


def _plural(num: int, noun: str) -> str:
    return f"{num} {noun}{'s' * (num != 1)}"
