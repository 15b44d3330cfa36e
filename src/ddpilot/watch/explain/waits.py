# SPDX-License-Identifier: Apache-2.0
"""Describe waits that may still end: as a status, later as a warning. They never end a job on their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.watch.explain.activity import Activity, describe_activity, say_where
from ddpilot.watch.explain.mismatch import show_common
from ddpilot.watch.explain.text import (
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
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobSnapshot
from ddpilot.watch.snapshot.stacks import passes


@dataclass(frozen=True, slots=True)
class OpenWait:
    """A wait for live ranks. `absent`: those that are elsewhere; empty if all have arrived or none is known."""

    view: JobSnapshot
    earlier: JobSnapshot | None
    wait: Wait
    absent: tuple[int, ...]

    def absences(self) -> Iterator[tuple[int, Activity]]:
        """Yield what each absent rank does."""
        for rank in self.absent:
            seen = self.view.ranks.get(rank)
            before = self.earlier.ranks.get(rank) if self.earlier is not None else None
            if seen is not None:
                yield rank, describe_activity(seen, before, self.view.now_ns)

    @property
    def waited(self) -> str:
        """The duration of the wait, formatted."""
        return say_s(self.view.now_ns - self.wait.since_ns)


def say_open_wait(one: OpenWait) -> str:
    """Return one line: which ranks wait, where and for how long, which ranks are absent, and what these do."""
    held = one.wait.held
    entry = held[min(held)]
    number = f" (#{one.wait.meeting.seq} of {name_group(one.wait.meeting.progress.group)})" if one.wait.meeting else ""
    what = describe_shortly(entry) if one.wait.meeting else describe(entry)
    spot = say_spot(entry.line)
    head = f"{render_ranks(held)} {_verb(held)} for {one.waited} in {what}{number}{f' at {spot}' if spot else ''}"
    return f"{head}; {_say_absent(one)}"


def _verb(ranks: Mapping[int, object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _say_absent(one: OpenWait) -> str:
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


def explain_open_wait(one: OpenWait, has_lasted: bool) -> Finding | None:
    """Return a warning once the wait `has_lasted`, an error if an absent rank is provably stuck, else None.

    An absent rank is stuck if it is in a call that itself needs the waiting ranks.
    """
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
    return make_finding(
        first.code,
        severity="error" if proven is not None else None,
        summary=f"{who} in {describe_shortly(entry)}",
        ranks=alike,
        line=place_of(first.at) or place_of(entry.line),
        evidence=(*lay_out(merge_rows(rows)), *common, _say_how_long(one)),
        why=first.why,
        fix=first.fix,
    )


def _say_how_long(one: OpenWait) -> str:
    # Not part of the summary, by which repeated findings are recognized.
    return f"for {one.waited} now"


def _is_proven(one: OpenWait, rank: int, absence: Activity) -> bool:
    """True if the rank is in a call that needs the waiting ranks: creating a group, or destroying all groups."""
    group = one.wait.meeting.progress.group if one.wait.meeting is not None else None
    if group is None or absence.at is None or one.view.ranks[rank].stack is None:
        return False
    if absence.moves == "moves":
        return False  # its stack is newer than its log: it may have passed the awaited collective
    if absence.code == "DDP216":
        return "destroy_process_group()" in absence.at.text
    is_making = passes(one.view.ranks[rank].stack, ":new_group") is not None
    return is_making and "use_local_sync" not in absence.at.text  # all ranks must call new_group, members or not


def _explain_full(one: OpenWait) -> Finding:
    entry = one.wait.held[min(one.wait.held)]
    return make_finding(
        "DDP218",
        summary=f"all ranks are in {describe_shortly(entry)}, and it does not end",
        ranks=tuple(sorted(one.wait.held)),
        line=place_of(entry.line),
        evidence=(
            *lay_out(merge_rows((rank, describe(each), say_place(each.line)) for rank, each in one.wait.held.items())),
            _say_how_long(one),
        ),
        why="they agree about it, so it is the data's way between them: a network, a firewall, or a peer-to-peer link",
        fix="look at the interfaces (NCCL_DEBUG=INFO; ddpilot explain DDP107, DDP108), and whether a rank was stopped",
    )
