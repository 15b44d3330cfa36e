# SPDX-License-Identifier: Apache-2.0
"""Analyze one snapshot of a job: what is wrong with it, and what its ranks wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import Collective
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.ddp_constructor import explain_wraps
from ddpilot.watch.explain.mismatch import explain_mismatch, involved
from ddpilot.watch.explain.process_group_init import find_rendezvous
from ddpilot.watch.explain.rank_exit import explain_death, explain_exited, explain_outlasted
from ddpilot.watch.explain.waits import OpenWait, explain_cycle, explain_message, explain_open_wait, say_open_wait
from ddpilot.watch.matching.mismatch import WRONG_BUT_RUNNING, MismatchedCollective, find_first_mismatches
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
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot

_STACK_AGE_NS = 1_000_000_000
"""An older stack may not show where the rank is now."""

_MAX_STACKS = 64
"""Maximum number of stacks of awaited ranks: more would not add information."""

_ORDER = ("error", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The result of analyzing one view of a job."""

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


def _is_interrupt(rank: RankSnapshot) -> bool:
    return rank.error is not None and rank.error.type_name == "KeyboardInterrupt"


@dataclass(slots=True)
class _Look:
    """The state of one analysis while it runs."""

    view: JobSnapshot
    earlier: JobSnapshot | None
    fates: dict[int, RankOutcome]
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
        return any(map(_is_interrupt, self.view.ranks.values()))


def analyze(
    view: JobSnapshot, earlier: JobSnapshot | None = None, *, stall_s: float = 2.0, stall_warn_s: float = 30.0
) -> Analysis:
    """Analyze what the ranks of `view` do together, and what prevents them from continuing.

    `view` must have been gathered in this order: processes, rings, stacks. `earlier`: a view of the same job some
    seconds before, with stacks if available; it shows which ranks move. `stall_s`: seconds that ranks may wait before
    an unproven wait becomes a status line; `stall_warn_s`: before it becomes a warning. Ranks that have ended, ranks in
    different collectives and ranks that wait in each other's groups are proven and reported at once. Has no side
    effects.
    """
    fates = {rank: outcome_of(view.ranks.get(rank)) for rank in _all_ranks(view)}
    before = before_common_end(view, fates)
    if before is not None:
        return _after_end(analyze(before, earlier, stall_s=stall_s, stall_warn_s=stall_warn_s))
    look = _Look(view, earlier, fates, Sources(view.sources), int(stall_s * 1e9), int(stall_warn_s * 1e9))
    progress = find_progress(rank.log for rank in view.ranks.values() if rank.log is not None)
    clashes = [meet for each in progress for meet in find_first_mismatches(each)]
    _say_clashes(look, [meet for meet in clashes if meet.newest_ns >= view.since_ns])
    _say_messages(look)
    stuck = {id(meet.progress) for meet in clashes if meet.clash.aspect not in WRONG_BUT_RUNNING}
    _say_waits(look, [each for each in progress if id(each) not in stuck])
    _say_rendezvous(look)
    _say_wraps(look)
    _say_deaths(look)
    return Analysis(
        findings=Findings(sorted(look.findings, key=lambda finding: _ORDER.index(finding.severity))),
        status=tuple(look.status),
        is_stalled=look.is_stalled,
        needs_stacks=tuple(sorted(rank for rank in look.needs if _can_answer(look, rank))),
    )


def _after_end(analysis: Analysis) -> Analysis:
    """Adapt the analysis of the state before all ranks were ended, which may have been a reaction to an error in it."""
    analysis = replace(analysis, needs_stacks=())
    return replace(analysis, status=()) if _has_errors(analysis.findings) else replace(analysis, end=COMMON_END)


def _has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def say_end(analysis: Analysis, findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the note that the whole job was ended from outside; empty if an error in `findings` may be the cause."""
    return (analysis.end,) if analysis.end and not _has_errors(findings) else ()


def _all_ranks(view: JobSnapshot) -> Iterable[int]:
    return sorted({*range(view.world_size), *view.ranks})


def _can_answer(look: _Look, rank: int) -> bool:
    """True if a new stack of `rank` can be taken and is needed."""
    seen = look.view.ranks.get(rank)
    if seen is None or look.fates[rank].is_gone:
        return False
    return seen.stack is None or look.view.now_ns - seen.stack.taken_ns > _STACK_AGE_NS


def _say_clashes(look: _Look, meets: Iterable[MismatchedCollective]) -> None:
    for meet in sorted(meets, key=lambda meet: min(entry.start_ns for entry in meet.by_rank.values())):
        finding = explain_mismatch(look.view, meet, look.sources)
        look.findings.append(finding)
        look.needs.update(involved(meet))
        if meet.clash.aspect in WRONG_BUT_RUNNING:
            look.silent.append(finding)
        else:
            look.is_stalled = True
            look.explained.update(meet.progress.group.ranks)


def _say_messages(look: _Look) -> None:
    for message in find_unequal_messages(look.view):
        if max(message.sent.start_ns, message.received.start_ns) >= look.view.since_ns:
            look.findings.append(explain_message(look.view, message))
            if message.sent.num_bytes > message.received.num_bytes:
                look.explained.update((message.sender, message.receiver))


def _say_waits(look: _Look, progress: Iterable[GroupProgress]) -> None:
    found = find_waits(look.view, look.fates, find_incomplete(look.view, progress))
    for rank, missing in found.needs_stacks.items():
        if _has_waited(look, rank):
            look.needs.update((rank, *missing[:_MAX_STACKS]))
    waits = [wait for wait in found.waits if not look.explained & wait.held.keys()]
    circles = [circle for circle in find_cycles(waits) if _is_proven(look.view, circle)]
    in_circles = {id(wait) for circle in circles for wait in circle}
    for circle in circles:
        look.is_stalled = True
        look.needs.update(rank for wait in circle for rank in list(wait.held)[:1])
        look.findings.append(explain_cycle(look.view, circle, look.sources))
        look.explained.update(rank for wait in circle for rank in wait.held)
    held = {rank for wait in waits for rank in wait.held}
    for wait in waits:
        if id(wait) not in in_circles:
            _say_wait(look, wait, held)


def _has_waited(look: _Look, rank: int) -> bool:
    log = look.view.ranks[rank].log
    newest = log.collectives[-1].start_ns if log is not None and log.collectives else 0
    return look.view.now_ns - newest > look.stall_ns // 2


def _say_wait(look: _Look, wait: Wait, held: set[int]) -> None:
    fates = {**look.fates, **{rank: _fate_in(look, wait, rank) for rank in wait.missing if rank not in held}}
    outlasted = explain_outlasted(look.view, look.earlier, wait, fates)
    if outlasted is not None:
        look.is_stalled = True
        look.findings.append(outlasted)
        look.explained.update(wait.held.keys() | set(wait.missing))
        return
    gone = [rank for rank in wait.missing if fates[rank].is_gone]
    is_over = any(entry.state == "failed" for entry in wait.held.values()) or look.fates[next(iter(wait.held))].is_gone
    if gone and look.is_interrupted:
        return  # the user interrupted the job, so that their end is expected
    if gone:
        look.is_stalled = True
        look.needs.update(list(wait.held)[:1])
        look.findings.append(explain_exited(look.view, wait, gone, fates, look.sources))
        look.explained.update(wait.held.keys() | set(gone))
        return
    absent = [rank for rank in wait.missing if rank not in held and not look.fates[rank].is_gone]
    waited_ns = look.view.now_ns - wait.since_ns
    if is_over or waited_ns < look.stall_ns or not (absent or not wait.missing):
        return  # the ranks that hold these up wait themselves, which is reported for them
    if not (wait.missing or wait.unknown) and not any(map(_is_seen_open, wait.held.values())):
        return  # all ranks have arrived: it may be over without showing it
    look.is_stalled = True
    look.needs.update(absent[:_MAX_STACKS])
    one = OpenWait(look.view, look.earlier, wait, tuple(absent))
    look.status.append(say_open_wait(one))
    finding = explain_open_wait(one, waited_ns > look.warn_ns)
    if finding is not None:
        look.findings.append(finding)


def _is_seen_open(entry: Collective) -> bool:
    """True if the completion of `entry` is being observed and has not occurred."""
    return entry.is_watched and entry.state != "unknown"


def _fate_in(look: _Look, wait: Wait, rank: int) -> RankOutcome:
    """Return the state of `rank` with regard to the group of `wait`."""
    seen, fate = look.view.ranks.get(rank), look.fates[rank]
    if seen is None or seen.log is None or fate.state != "alive":
        return fate
    if wait.meeting is not None:
        last = wait.meeting.progress.last(rank)
    else:
        groups = {entry.group.key for entry in wait.held.values() if entry.group is not None}
        entries = reversed(seen.log.collectives)
        last = next((entry for entry in entries if entry.group is not None and entry.group.key in groups), None)
    is_cut_off = any(look.fates[each].state == "victim" for each in wait.held)
    return with_departure(seen, fate, last, look.view.now_ns, is_cut_off=is_cut_off)


def _is_proven(view: JobSnapshot, circle: Iterable[Wait]) -> bool:
    """True if no other thread can resolve the cycle: no rank in it starts collectives from several threads."""
    return all(_num_threads(view.ranks[rank]) == 1 for wait in circle for rank in wait.held)


def _num_threads(rank: RankSnapshot) -> int:
    entries = rank.log.collectives if rank.log is not None else ()
    return len({entry.thread for entry in entries if entry.ddp is None}) or 1


def _say_rendezvous(look: _Look) -> None:
    found = find_rendezvous(look.view, look.earlier, look.fates, look.stall_ns, look.warn_ns)
    look.needs |= set(found.needs_stacks)
    look.status += found.status
    look.is_stalled |= bool(found.status or found.findings)
    look.findings += found.findings
    look.explained |= {rank for finding in found.findings for rank in finding.ranks}


def _say_wraps(look: _Look) -> None:
    finding = explain_wraps(look.view)
    if finding is not None:
        # The other ranks lose their connections or wait in the next collective: these findings are consequences.
        look.findings[:] = [each for each in look.findings if each in look.silent]
        look.findings.append(finding)


def _say_deaths(look: _Look) -> None:
    if look.is_interrupted:
        return
    firsts = [rank for rank in first_deaths(look.view, look.fates) if rank not in look.explained]
    if not firsts or any(finding.severity == "error" and finding not in look.silent for finding in look.findings):
        return  # other deaths are consequences of that error
    by_words: dict[str, list[int]] = {}
    for rank in firsts:
        by_words.setdefault(look.fates[rank].words, []).append(rank)
    look.findings += [explain_death(look.view, ranks, words) for words, ranks in by_words.items()]
