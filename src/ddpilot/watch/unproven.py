# SPDX-License-Identifier: Apache-2.0
"""Waits that may still end: said as a status, and as a warning once they have lasted; never the end of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ddpilot.findings.finding import Finding
from ddpilot.findings.words import render_ranks
from ddpilot.watch.absent import Absence, describe_absence, say_where
from ddpilot.watch.causes import NAMES
from ddpilot.watch.clashes import show_common
from ddpilot.watch.fates import Fate
from ddpilot.watch.stacks import innermost, passes
from ddpilot.watch.view import Frame, JobView, RankView
from ddpilot.watch.waits import Wait
from ddpilot.watch.words import (
    describe,
    describe_shortly,
    lay_out,
    merge_rows,
    name_group,
    place_of,
    say_place,
    say_s,
    say_spot,
    who_does,
)

_STACK_AGE_NS = 5_000_000_000
_ALL_INSIDE_NS = 10_000_000_000
"""So long after the start, or after a group was left, it is odd that all ranks make a group and have none."""
_MAX_STACKS = 64


@dataclass(frozen=True, slots=True)
class Open:
    """A wait for ranks that are alive and elsewhere: `absent`, none of them where all have come or none is known."""

    view: JobView
    earlier: JobView | None
    wait: Wait
    absent: tuple[int, ...]

    def absences(self) -> Iterator[tuple[int, Absence]]:
        """What each of them does."""
        for rank in self.absent:
            seen = self.view.ranks.get(rank)
            before = self.earlier.ranks.get(rank) if self.earlier is not None else None
            if seen is not None:
                yield rank, describe_absence(seen, before, self.view.now_ns)

    @property
    def waited(self) -> str:
        """For how long."""
        return say_s(self.view.now_ns - self.wait.since_ns)


def say_open(one: Open) -> str:
    """One line: who waits where since when, who has not come, and what that one does."""
    held = one.wait.held
    entry = held[min(held)]
    number = f" (#{one.wait.meeting.seq} of {name_group(one.wait.meeting.progress.group)})" if one.wait.meeting else ""
    what = describe_shortly(entry) if one.wait.meeting else describe(entry)
    head = f"{render_ranks(held)} {_verb(held)} for {one.waited} in {what}{number} at {say_spot(entry.line)}"
    return f"{head}; {_say_absent(one)}"


def _verb(ranks: Mapping[int, object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _say_absent(one: Open) -> str:
    if not one.absent:
        return (
            f"of {render_ranks(one.wait.unknown)} nothing is known here"
            if one.wait.unknown
            else "all ranks have come, and it does not end: their connection may be blocked"
        )
    by_words: dict[str, list[int]] = {}
    for rank, absence in one.absences():
        where = say_where(absence)
        by_words.setdefault(f"{absence.words}: {where}" if where else absence.words, []).append(rank)
    said = [who_does(ranks, words, max_chars=40) for words, ranks in list(by_words.items())[:3]]
    more = f" and {len(by_words) - 3} more" if len(by_words) > 3 else ""
    return "not there: " + "; ".join(said) + more


def explain_open(one: Open, has_lasted: bool) -> Finding | None:
    """A warning, once it `has_lasted`; at once an error where a rank has begun what it can only do with the others."""
    absences = list(one.absences())
    proven = next(((rank, each) for rank, each in absences if _is_proven(one, rank, each)), None)
    if not has_lasted and proven is None:
        return None
    if not absences:
        return _explain_full(one) if not one.wait.unknown else None
    rank, first = proven or absences[0]
    alike = tuple(other for other, absence in absences if absence.code == first.code) if proven is None else (rank,)
    entry = one.wait.held[min(one.wait.held)]
    rows = [(rank, describe(entry), say_place(entry.line)) for rank, entry in sorted(one.wait.held.items())]
    rows += [(rank, absence.words, say_where(absence)) for rank, absence in absences]
    common = show_common(one.wait.meeting.progress, one.wait.meeting.seq) if one.wait.meeting is not None else ()
    who = f"{render_ranks(one.wait.held)} {_verb(one.wait.held)} for {render_ranks(alike)}"
    return Finding(
        code=first.code,
        name=NAMES[first.code],
        severity="error" if proven is not None else first.severity,
        summary=f"{who} in {describe_shortly(entry)}",
        ranks=alike,
        place=place_of(first.at) or place_of(entry.line),
        evidence=(*lay_out(merge_rows(rows)), *common, _say_how_long(one)),
        why=first.why,
        fix=first.fix,
        source=f"ddpilot explain {first.code}",
    )


def _say_how_long(one: Open) -> str:
    # No part of the summary, by which a finding is known that was told before.
    return f"for {one.waited} now"


def _is_proven(one: Open, rank: int, absence: Absence) -> bool:
    """It is in a call that needs those who wait for it: to make a group, or to end all groups."""
    group = one.wait.meeting.progress.group if one.wait.meeting is not None else None
    if group is None or absence.at is None or one.view.ranks[rank].stack is None:
        return False
    if absence.code == "DDP216":
        return "destroy_process_group()" in absence.at.text
    is_making = passes(one.view.ranks[rank].stack, ":new_group") is not None
    return is_making and len(group.ranks) == one.view.world_size and "use_local_sync" not in absence.at.text


def _explain_full(one: Open) -> Finding:
    entry = one.wait.held[min(one.wait.held)]
    return Finding(
        code="DDP218",
        name=NAMES["DDP218"],
        severity="warning",
        summary=f"all ranks are in {describe_shortly(entry)}, and it does not end",
        ranks=tuple(sorted(one.wait.held)),
        place=place_of(entry.line),
        evidence=(
            *lay_out(merge_rows((rank, describe(each), say_place(each.line)) for rank, each in one.wait.held.items())),
            _say_how_long(one),
        ),
        why="they agree about it, so it is the data's way between them: a network, a firewall, or a peer-to-peer link",
        fix="look at the interfaces (NCCL_DEBUG=INFO; ddpilot explain DDP107, DDP108), and whether a rank was stopped",
        source="ddpilot explain DDP218",
    )


@dataclass(slots=True)
class Rendezvous:
    """Ranks that wait until a group is made."""

    status: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    needs_stacks: list[int] = field(default_factory=list)


def find_rendezvous(
    view: JobView, earlier: JobView | None, fates: Mapping[int, Fate], stall_ns: int, warn_ns: int
) -> Rendezvous:
    """Ranks in no group, as without any collective yet, that are in init_process_group, and those that are not."""
    found = Rendezvous()
    logs = {rank: seen.log for rank, seen in view.ranks.items() if seen.log is not None}
    fresh = [rank for rank, log in logs.items() if not log.num_begun or log.left_ns is not None]
    alive = [rank for rank in fresh if not fates[rank].is_gone and _age_ns(view, rank) > stall_ns]
    found.needs_stacks = [rank for rank in alive if _is_old(view, rank)][:_MAX_STACKS]
    inside = [rank for rank in alive if _is_inside(view.ranks[rank])]
    if not inside:
        return found
    if len(inside) == view.world_size:
        _say_all_inside(found, view, earlier, inside, warn_ns)
        return found
    absent = [rank for rank in range(view.world_size) if rank not in inside]
    gone = [rank for rank in absent if fates[rank].is_gone]
    rows = [(rank, "waits in init_process_group", say_place(_line(view, rank))) for rank in inside]
    rows += [(rank, *_say_elsewhere(view, earlier, fates, rank)) for rank in absent]
    merged = merge_rows(rows)
    said = "; ".join(f"{ranks} {what}" + (f": {where}" if where else "") for ranks, what, where in merged[:4])
    found.status.append(f"the group is not complete: {said}")
    if gone or max(_age_ns(view, rank) for rank in inside) > warn_ns:
        found.findings.append(_explain_rendezvous(view, inside, gone or absent, lay_out(merged), bool(gone)))
    return found


def _is_inside(rank: RankView | None) -> bool:
    stack = rank.stack if rank is not None else None
    return passes(stack, ":init_process_group", "/rendezvous.py:") is not None


def _say_all_inside(found: Rendezvous, view: JobView, earlier: JobView | None, inside: list[int], warn_ns: int) -> None:
    waited_ns = min(_age_ns(view, rank) for rank in inside)
    if waited_ns < _ALL_INSIDE_NS or earlier is None or not all(_is_inside(earlier.ranks.get(rank)) for rank in inside):
        return
    line = _line(view, inside[0])
    found.status.append(f"all ranks are in init_process_group at {say_place(line)}, and it does not end")
    logs = [view.ranks[rank].log for rank in inside]
    if waited_ns < warn_ns or not all(log is not None and log.left_ns for log in logs):
        return  # before the first group it is not known for how long they have been there
    found.findings.append(
        Finding(
            code="DDP215",
            name=NAMES["DDP215"],
            severity="warning",
            summary="all ranks are in init_process_group, after they have destroyed a group, and it does not end",
            ranks=tuple(inside),
            place=place_of(line),
            why="a rank that was faster has read the addresses that others left in the store for the old group, or has "
            "ended the store with it",
            fix="call dist.barrier() before destroy_process_group and give the new group a store or a port of its own; "
            "or keep the group; ddpilot.init_group() can be entered again",
            source="ddpilot explain DDP215",
        )
    )


def _explain_rendezvous(
    view: JobView, inside: list[int], missing: list[int], evidence: tuple[str, ...], is_proven: bool
) -> Finding:
    return Finding(
        code="DDP215",
        name=NAMES["DDP215"],
        severity="error" if is_proven else "warning",
        summary=f"{who_does(inside, 'waits in init_process_group')} for {render_ranks(missing)}",
        ranks=tuple(missing),
        place=place_of(_line(view, inside[0])),
        evidence=evidence,
        why="a group is complete when all ranks have called init_process_group: these have not",
        fix="look at why they did not come: an error before, another WORLD_SIZE or address, a branch on the rank",
        source="ddpilot explain DDP215",
    )


def _age_ns(view: JobView, rank: int) -> int:
    log = view.ranks[rank].log
    return view.now_ns - (log.left_ns or log.started_ns) if log is not None else 0


def _is_old(view: JobView, rank: int) -> bool:
    stack = view.ranks[rank].stack
    return stack is None or view.now_ns - stack.taken_ns > _STACK_AGE_NS


def _line(view: JobView, rank: int) -> Frame | None:
    return innermost(view.ranks[rank].stack)


def _say_elsewhere(view: JobView, earlier: JobView | None, fates: Mapping[int, Fate], rank: int) -> tuple[str, str]:
    seen = view.ranks.get(rank)
    if seen is None or fates[rank].state == "unknown":
        return "is not seen here", ""
    if fates[rank].is_gone:
        return fates[rank].words, ""
    absence = describe_absence(seen, earlier.ranks.get(rank) if earlier is not None else None, view.now_ns)
    return absence.words, say_where(absence)
