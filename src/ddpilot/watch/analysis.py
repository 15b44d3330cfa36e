# SPDX-License-Identifier: Apache-2.0
"""Analyze one snapshot of a job: its errors, and the waits of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.mismatch import explain_mismatch, explain_wraps
from ddpilot.watch.explain.open_waits import explain_cycle, explain_message, explain_open_wait, render_open_wait
from ddpilot.watch.explain.process_group_init import explain_group_init
from ddpilot.watch.explain.rank_exit import explain_death, explain_exited, explain_outlasted
from ddpilot.watch.explain.text import Draft
from ddpilot.watch.matching.mismatch import MismatchedCollective, find_first_mismatches
from ddpilot.watch.matching.outcomes import COMMON_END, before_common_end, first_deaths, outcome_of
from ddpilot.watch.matching.progress import GroupProgress, find_progress
from ddpilot.watch.matching.waits import Wait, find_cycles, find_unequal_messages, find_waits, outcome_in
from ddpilot.watch.snapshot.model import JobSnapshot

_STACK_AGE_NS = 1_000_000_000
"""An older stack may not show where the rank is now."""

_MAX_STACKS = 64
"""Maximum number of stacks of awaited ranks: more would not add information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The result of analyzing one snapshot of a job."""

    findings: Findings
    """Proven errors, and waits that have lasted long enough to be reported (warnings, info); most severe first."""
    status: tuple[str, ...] = ()
    """One line for each unproven wait; empty if there is none."""
    is_stalled: bool = False
    """True if a rank has waited for others for longer than `stall_s`, or for a rank that has ended."""
    needs_stacks: tuple[int, ...] = ()
    """Ranks whose stacks are needed: with them, the analysis finds all causes."""
    end: str = ""
    """A note if all ranks were ended at once from outside; the other fields then describe the state before it."""


def analyze(
    job: JobSnapshot, earlier: JobSnapshot | None = None, *, stall_s: float = 2.0, stall_warn_s: float = 30.0
) -> Analysis:
    """Analyze what the ranks of `job` do together, and what prevents them from continuing.

    `job` must have been gathered in this order: processes, rings, stacks. `earlier`: a snapshot of the same job some
    seconds before, with stacks if available; it shows which ranks move. `stall_s`: seconds that ranks may wait before
    an unproven wait becomes a status line; `stall_warn_s`: before it becomes a warning. Ranks that have ended, ranks in
    different collectives and ranks that wait in each other's groups are proven and reported at once. Has no side
    effects.
    """
    ranks = sorted({*range(job.world_size), *job.ranks})
    outcomes = {rank: outcome_of(job.ranks.get(rank)) for rank in ranks}
    before = before_common_end(job, outcomes)
    if before is not None:
        analysis = replace(analyze(before, earlier, stall_s=stall_s, stall_warn_s=stall_warn_s), needs_stacks=())
        # The end may have been a reaction to an error in the state before.
        return replace(analysis, status=()) if _has_errors(analysis.findings) else replace(analysis, end=COMMON_END)
    stall_ns, warn_ns, sources = int(stall_s * 1e9), int(stall_warn_s * 1e9), Sources(job.sources)
    draft = Draft(job=job, earlier=earlier, outcomes=outcomes, sources=sources, stall_ns=stall_ns, warn_ns=warn_ns)
    progress = find_progress(rank.log for rank in job.ranks.values() if rank.log is not None)
    mismatches = [mismatched for each in progress for mismatched in find_first_mismatches(each)]
    _explain_mismatches(draft, [mismatched for mismatched in mismatches if mismatched.newest_ns >= job.since_ns])
    _explain_messages(draft)
    stuck = {id(mismatched.progress) for mismatched in mismatches if not mismatched.is_silent}
    _explain_waits(draft, [each for each in progress if id(each) not in stuck])
    explain_group_init(draft)
    _explain_wraps(draft)
    _explain_deaths(draft)
    return Analysis(
        findings=Findings(draft.findings),
        status=tuple(draft.status),
        is_stalled=draft.is_stalled,
        needs_stacks=tuple(sorted(rank for rank in draft.needs if _can_answer(draft, rank))),
    )


def _has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def render_end(analysis: Analysis, findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the note that the whole job was ended from outside; empty if an error in `findings` may be the cause."""
    return (analysis.end,) if analysis.end and not _has_errors(findings) else ()


def _can_answer(draft: Draft, rank: int) -> bool:
    """True if a new stack of `rank` can be taken and is needed."""
    seen = draft.job.ranks.get(rank)
    if seen is None or draft.outcomes[rank].is_gone:
        return False
    return seen.stack is None or draft.job.now_ns - seen.stack.taken_ns > _STACK_AGE_NS


def _explain_mismatches(draft: Draft, found: Iterable[MismatchedCollective]) -> None:
    for mismatched in sorted(found, key=lambda each: each.since_ns):
        finding = explain_mismatch(draft.job, mismatched, draft.sources)
        needs = [ranks[0] for ranks in mismatched.sides]
        if mismatched.is_silent:
            draft.silent.append(finding)
            draft.findings.append(finding)
            draft.needs.update(needs)
        else:
            draft.add_proven(finding, mismatched.progress.group.ranks, needs)


def _explain_messages(draft: Draft) -> None:
    for message in find_unequal_messages(draft.job):
        if max(message.sent.start_ns, message.received.start_ns) >= draft.job.since_ns:
            draft.findings.append(explain_message(draft.job, message))
            if message.sent.num_bytes > message.received.num_bytes:
                draft.explained.update((message.sender, message.receiver))


def _explain_waits(draft: Draft, progress: Iterable[GroupProgress]) -> None:
    found, needs_stacks = find_waits(draft.job, draft.outcomes, progress)
    for rank, missing in needs_stacks.items():
        newest_ns = max((entry.start_ns for entry in draft.job.ranks[rank].collectives[-1:]), default=0)
        if draft.job.now_ns - newest_ns > draft.stall_ns // 2:
            draft.needs.update((rank, *missing[:_MAX_STACKS]))
    waits = [wait for wait in found if not draft.explained & wait.held.keys()]
    cycles = [cycle for cycle in find_cycles(waits) if _is_proven(draft.job, cycle)]
    in_cycles = {id(wait) for cycle in cycles for wait in cycle}
    for cycle in cycles:
        ranks = {rank for wait in cycle for rank in wait.held}
        finding = explain_cycle(draft.job, cycle, draft.sources)
        draft.add_proven(finding, ranks, [next(iter(wait.held)) for wait in cycle])
    held = {rank for wait in waits for rank in wait.held}
    for wait in waits:
        if id(wait) not in in_cycles:
            _explain_wait(draft, wait, held)


def _explain_wait(draft: Draft, wait: Wait, held: set[int]) -> None:
    elsewhere = [rank for rank in wait.missing if rank not in held]
    outcomes = draft.outcomes | {rank: outcome_in(draft.job, draft.outcomes, wait, rank) for rank in elsewhere}
    here = replace(draft, outcomes=outcomes)
    outlasted = explain_outlasted(here, wait)
    if outlasted is not None:
        draft.add_proven(outlasted, {*wait.held, *wait.missing})
        return
    gone = [rank for rank in wait.missing if outcomes[rank].is_gone]
    has_failed = any(entry.state == "failed" for entry in wait.held.values())
    is_over = has_failed or draft.outcomes[next(iter(wait.held))].is_gone
    if gone and draft.is_interrupted:
        return  # the user interrupted the job, so that their end is expected
    if gone:
        finding = explain_exited(here, wait, gone)
        draft.add_proven(finding, {*wait.held, *gone}, list(wait.held)[:1])
        return
    absent = [rank for rank in elsewhere if not draft.outcomes[rank].is_gone]
    waited_ns = draft.job.now_ns - wait.since_ns
    if is_over or waited_ns < draft.stall_ns or not (absent or not wait.missing):
        return  # the ranks that hold these up wait themselves, which is reported for them
    are_seen_open = (entry.is_watched and entry.state != "unknown" for entry in wait.held.values())
    if not (wait.missing or wait.unknown or any(are_seen_open)):
        return  # all ranks have arrived: it may be over without showing it
    draft.needs.update(absent[:_MAX_STACKS])
    draft.add_status(render_open_wait(draft, wait, absent))
    warning = explain_open_wait(draft, wait, absent, has_lasted=waited_ns > draft.warn_ns)
    draft.findings += [warning] if warning is not None else []


def _is_proven(job: JobSnapshot, cycle: Iterable[Wait]) -> bool:
    """True if no other thread can resolve the cycle: no rank in it starts collectives from several threads."""
    ranks = [job.ranks[rank] for wait in cycle for rank in wait.held]
    return all(len({entry.thread for entry in rank.collectives if entry.ddp is None}) <= 1 for rank in ranks)


def _explain_wraps(draft: Draft) -> None:
    finding = explain_wraps(draft.job)
    if finding is not None:
        # The other ranks lose their connections or wait in the next collective: these findings are consequences.
        draft.findings[:] = [each for each in draft.findings if each in draft.silent]
        draft.findings.append(finding)


def _explain_deaths(draft: Draft) -> None:
    if draft.is_interrupted:
        return
    firsts = [rank for rank in first_deaths(draft.job, draft.outcomes) if rank not in draft.explained]
    if not firsts or any(finding.severity == "error" and finding not in draft.silent for finding in draft.findings):
        return  # other deaths are consequences of that error
    by_words: dict[str, list[int]] = {}
    for rank in firsts:
        by_words.setdefault(draft.outcomes[rank].words, []).append(rank)
    draft.findings += [explain_death(draft.job, ranks, words) for words, ranks in by_words.items()]
