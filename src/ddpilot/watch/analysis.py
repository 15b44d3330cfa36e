# SPDX-License-Identifier: Apache-2.0
"""Analyze one snapshot of a job: its errors, and the waits of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import Collective
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.ddp_constructor import explain_wraps
from ddpilot.watch.explain.mismatch import explain_mismatch, one_rank_per_side
from ddpilot.watch.explain.open_waits import (
    OpenWait,
    explain_cycle,
    explain_message,
    explain_open_wait,
    render_open_wait,
)
from ddpilot.watch.explain.process_group_init import find_rendezvous
from ddpilot.watch.explain.rank_exit import explain_death, explain_exited, explain_outlasted
from ddpilot.watch.matching.mismatch import MismatchedCollective, find_first_mismatches
from ddpilot.watch.matching.outcomes import (
    COMMON_END,
    RankOutcome,
    before_common_end,
    first_deaths,
    outcome_of,
    with_departure,
)
from ddpilot.watch.matching.progress import GroupProgress, find_incomplete, find_progress
from ddpilot.watch.matching.waits import Wait, find_cycles, find_unequal_messages, find_waits
from ddpilot.watch.snapshot.model import JobSnapshot

_STACK_AGE_NS = 1_000_000_000
"""An older stack may not show where the rank is now."""

_MAX_STACKS = 64
"""Maximum number of stacks of awaited ranks: more would not add information."""

_ORDER = ("error", "warning", "info")


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


@dataclass(slots=True)
class _State:
    """The state of one analysis while it runs."""

    job: JobSnapshot
    earlier: JobSnapshot | None
    outcomes: dict[int, RankOutcome]
    sources: Sources
    stall_ns: int
    warn_ns: int
    findings: list[Finding] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    explained: set[int] = field(default_factory=set)
    """Ranks whose end is explained by a finding."""
    silent: list[Finding] = field(default_factory=list)
    """The findings, among `findings`, that make no rank fail or wait."""
    is_stalled: bool = False

    @property
    def is_interrupted(self) -> bool:
        """True if a rank ended with KeyboardInterrupt, as all ranks of a terminal do on Ctrl-C."""
        errors = (rank.error for rank in self.job.ranks.values())
        return any(error is not None and error.type_name == "KeyboardInterrupt" for error in errors)

    def add_proven(self, finding: Finding, explained: Iterable[int], needs: Iterable[int] = ()) -> None:
        """Add a finding about ranks that cannot continue. `needs`: ranks whose stacks show more."""
        self.is_stalled = True
        self.findings.append(finding)
        self.explained.update(explained)
        self.needs.update(needs)


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
        return _after_end(analyze(before, earlier, stall_s=stall_s, stall_warn_s=stall_warn_s))
    state = _State(job, earlier, outcomes, Sources(job.sources), int(stall_s * 1e9), int(stall_warn_s * 1e9))
    progress = find_progress(rank.log for rank in job.ranks.values() if rank.log is not None)
    mismatches = [mismatched for each in progress for mismatched in find_first_mismatches(each)]
    _explain_mismatches(state, [mismatched for mismatched in mismatches if mismatched.newest_ns >= job.since_ns])
    _explain_messages(state)
    stuck = {id(mismatched.progress) for mismatched in mismatches if not mismatched.is_silent}
    _explain_waits(state, [each for each in progress if id(each) not in stuck])
    _explain_rendezvous(state)
    _explain_wraps(state)
    _explain_deaths(state)
    return Analysis(
        findings=Findings(sorted(state.findings, key=lambda finding: _ORDER.index(finding.severity))),
        status=tuple(state.status),
        is_stalled=state.is_stalled,
        needs_stacks=tuple(sorted(rank for rank in state.needs if _can_answer(state, rank))),
    )


def _after_end(analysis: Analysis) -> Analysis:
    """Adapt the analysis of the state before all ranks were ended, which may have been a reaction to an error in it."""
    analysis = replace(analysis, needs_stacks=())
    return replace(analysis, status=()) if _has_errors(analysis.findings) else replace(analysis, end=COMMON_END)


def _has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def render_end(analysis: Analysis, findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the note that the whole job was ended from outside; empty if an error in `findings` may be the cause."""
    return (analysis.end,) if analysis.end and not _has_errors(findings) else ()


def _can_answer(state: _State, rank: int) -> bool:
    """True if a new stack of `rank` can be taken and is needed."""
    seen = state.job.ranks.get(rank)
    if seen is None or state.outcomes[rank].is_gone:
        return False
    return seen.stack is None or state.job.now_ns - seen.stack.taken_ns > _STACK_AGE_NS


def _explain_mismatches(state: _State, found: Iterable[MismatchedCollective]) -> None:
    for mismatched in sorted(found, key=lambda each: each.since_ns):
        finding = explain_mismatch(state.job, mismatched, state.sources)
        needs = one_rank_per_side(mismatched)
        if mismatched.is_silent:
            state.silent.append(finding)
            state.findings.append(finding)
            state.needs.update(needs)
        else:
            state.add_proven(finding, mismatched.progress.group.ranks, needs)


def _explain_messages(state: _State) -> None:
    for message in find_unequal_messages(state.job):
        if max(message.sent.start_ns, message.received.start_ns) >= state.job.since_ns:
            state.findings.append(explain_message(state.job, message))
            if message.sent.num_bytes > message.received.num_bytes:
                state.explained.update((message.sender, message.receiver))


def _explain_waits(state: _State, progress: Iterable[GroupProgress]) -> None:
    found = find_waits(state.job, state.outcomes, find_incomplete(state.job, progress))
    for rank, missing in found.needs_stacks.items():
        if _has_waited(state, rank):
            state.needs.update((rank, *missing[:_MAX_STACKS]))
    waits = [wait for wait in found.waits if not state.explained & wait.held.keys()]
    cycles = [cycle for cycle in find_cycles(waits) if _is_proven(state.job, cycle)]
    in_cycles = {id(wait) for cycle in cycles for wait in cycle}
    for cycle in cycles:
        ranks = {rank for wait in cycle for rank in wait.held}
        finding = explain_cycle(state.job, cycle, state.sources)
        state.add_proven(finding, ranks, [next(iter(wait.held)) for wait in cycle])
    held = {rank for wait in waits for rank in wait.held}
    for wait in waits:
        if id(wait) not in in_cycles:
            _explain_wait(state, wait, held)


def _has_waited(state: _State, rank: int) -> bool:
    newest_ns = max((entry.start_ns for entry in state.job.ranks[rank].collectives[-1:]), default=0)
    return state.job.now_ns - newest_ns > state.stall_ns // 2


def _explain_wait(state: _State, wait: Wait, held: set[int]) -> None:
    outcomes = {**state.outcomes, **{rank: _outcome_in(state, wait, rank) for rank in wait.missing if rank not in held}}
    outlasted = explain_outlasted(state.job, state.earlier, wait, outcomes)
    if outlasted is not None:
        state.add_proven(outlasted, {*wait.held, *wait.missing})
        return
    gone = [rank for rank in wait.missing if outcomes[rank].is_gone]
    has_failed = any(entry.state == "failed" for entry in wait.held.values())
    is_over = has_failed or state.outcomes[next(iter(wait.held))].is_gone
    if gone and state.is_interrupted:
        return  # the user interrupted the job, so that their end is expected
    if gone:
        finding = explain_exited(state.job, wait, gone, outcomes, state.sources)
        state.add_proven(finding, {*wait.held, *gone}, list(wait.held)[:1])
        return
    absent = [rank for rank in wait.missing if rank not in held and not state.outcomes[rank].is_gone]
    waited_ns = state.job.now_ns - wait.since_ns
    if is_over or waited_ns < state.stall_ns or not (absent or not wait.missing):
        return  # the ranks that hold these up wait themselves, which is reported for them
    if not (wait.missing or wait.unknown) and not any(map(_is_seen_open, wait.held.values())):
        return  # all ranks have arrived: it may be over without showing it
    state.is_stalled = True
    state.needs.update(absent[:_MAX_STACKS])
    one = OpenWait(state.job, state.earlier, wait, tuple(absent))
    state.status.append(render_open_wait(one))
    warning = explain_open_wait(one, waited_ns > state.warn_ns)
    state.findings += [warning] if warning is not None else []


def _is_seen_open(entry: Collective) -> bool:
    """True if the completion of `entry` is being observed and has not occurred."""
    return entry.is_watched and entry.state != "unknown"


def _outcome_in(state: _State, wait: Wait, rank: int) -> RankOutcome:
    """Return the state of `rank` with regard to the group of `wait`."""
    seen, outcome = state.job.ranks.get(rank), state.outcomes[rank]
    if seen is None or seen.log is None or outcome.state != "alive":
        return outcome
    if wait.incomplete is not None:
        last = wait.incomplete.progress.last(rank)
    else:
        groups = {entry.group.key for entry in wait.held.values() if entry.group is not None}
        entries = reversed(seen.collectives)
        last = next((entry for entry in entries if entry.group is not None and entry.group.key in groups), None)
    is_cut_off = any(state.outcomes[each].state == "victim" for each in wait.held)
    return with_departure(seen, outcome, last, state.job.now_ns, is_cut_off=is_cut_off)


def _is_proven(job: JobSnapshot, cycle: Iterable[Wait]) -> bool:
    """True if no other thread can resolve the cycle: no rank in it starts collectives from several threads."""
    ranks = [job.ranks[rank] for wait in cycle for rank in wait.held]
    return all(len({entry.thread for entry in rank.collectives if entry.ddp is None}) <= 1 for rank in ranks)


def _explain_rendezvous(state: _State) -> None:
    found = find_rendezvous(state.job, state.earlier, state.outcomes, state.stall_ns, state.warn_ns)
    state.needs |= set(found.needs_stacks)
    state.status += found.status
    state.is_stalled |= bool(found.status or found.findings)
    state.findings += found.findings
    state.explained |= {rank for finding in found.findings for rank in finding.ranks}


def _explain_wraps(state: _State) -> None:
    finding = explain_wraps(state.job)
    if finding is not None:
        # The other ranks lose their connections or wait in the next collective: these findings are consequences.
        state.findings[:] = [each for each in state.findings if each in state.silent]
        state.findings.append(finding)


def _explain_deaths(state: _State) -> None:
    if state.is_interrupted:
        return
    firsts = [rank for rank in first_deaths(state.job, state.outcomes) if rank not in state.explained]
    if not firsts or any(finding.severity == "error" and finding not in state.silent for finding in state.findings):
        return  # other deaths are consequences of that error
    by_words: dict[str, list[int]] = {}
    for rank in firsts:
        by_words.setdefault(state.outcomes[rank].words, []).append(rank)
    state.findings += [explain_death(state.job, ranks, words) for words, ranks in by_words.items()]
