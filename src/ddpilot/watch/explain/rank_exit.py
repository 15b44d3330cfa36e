# SPDX-License-Identifier: Apache-2.0
"""Explain waits that cannot end: for a rank that has ended, or in a cycle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.causes import FIXES, Cause, Party, find_cause
from ddpilot.watch.explain.mismatch import find_origin, make_party, show_common
from ddpilot.watch.explain.text import (
    describe,
    describe_shortly,
    lay_out,
    merge_rows,
    name_group,
    place_of,
    say_call,
    say_place,
    who_does,
)
from ddpilot.watch.matching.messages import tag_of
from ddpilot.watch.matching.outcomes import Fate, first_deaths
from ddpilot.watch.matching.progress import Meeting, Progress
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobView, RankView
from ddpilot.watch.snapshot.stacks import chain_of

_BRANCH_FIX = (
    "call it on all ranks of its group: move it out of the branch; and use groups in the same order on all ranks"
)
_DEATH_FIX = "look at how it ended; the others wait for it, and end with errors of their own"


def explain_gone(
    view: JobView, wait: Wait, gone: Sequence[int], fates: Mapping[int, Fate], sources: Sources
) -> Finding:
    """Return the finding for ranks that wait for ranks that have ended."""
    ranks = _blame(view, gone, fates)
    words = fates[ranks[0]].words
    has_died = fates[ranks[0]].state != "finished"
    held = tuple(sorted(wait.held))
    one = _party(view, wait, held)
    cause = _find_cause(view, wait, one, ranks, has_died, sources)
    code = cause.code if cause is not None else _code_of(wait, view.ranks.get(ranks[0]), has_died)
    at = cause.at if cause is not None else one.chain[-1] if one.chain else None
    if has_died and cause is None:
        error_chain = chain_of(view.ranks[ranks[0]], None) if ranks[0] in view.ranks else ()
        at = error_chain[-1] if error_chain else at
    return make_finding(
        code,
        severity="error",
        summary=f"{who_does(ranks, words)}, and {_wait_for(held)} {_it(ranks)} in {_say_what(wait)}",
        ranks=cause.ranks if cause is not None and cause.ranks else ranks,
        line=place_of(at),
        evidence=(*_show(view, wait, gone, fates), *_common(wait)),
        why=cause.why if cause is not None else _why(wait, ranks, words, has_died),
        fix=FIXES.get(code, _DEATH_FIX),
    )


def _code_of(wait: Wait, gone: RankView | None, has_died: bool) -> str:
    if has_died:
        return "DDP209"
    if wait.meeting is None:
        return "DDP219"
    if gone is None or gone.log is None or gone.process.state != "running":
        return "DDP208"
    return "DDP216" if gone.log.closed_ns is None else "DDP208"


def _blame(view: JobView, gone: Sequence[int], fates: Mapping[int, Fate]) -> tuple[int, ...]:
    """Return the ranks, of those in `gone`, that ended first; all of them ended in the same way."""
    firsts = [rank for rank in first_deaths(view, dict(fates)) if rank in gone]
    for state in ("died", "finished", "victim"):
        of_state = [rank for rank in (firsts if state == "died" and firsts else gone) if fates[rank].state == state]
        if of_state:
            words = fates[of_state[0]].words
            return tuple(rank for rank in of_state if fates[rank].words == words)
    return tuple(gone)


def _party(view: JobView, wait: Wait, held: tuple[int, ...]) -> Party:
    if wait.meeting is not None:
        return make_party(view, wait.meeting.progress, held, wait.meeting.seq)
    entry, log = wait.held[held[0]], view.ranks[held[0]].log
    entries = (*(each for each in (log.collectives if log is not None else ()) if each.is_p2p), entry)
    lines = frozenset((each.line.file, each.line.line) for each in entries if each.line is not None)
    return Party(ranks=held, chain=chain_of(view.ranks[held[0]], entry), entry=entry, lines=lines)


def _find_cause(
    view: JobView, wait: Wait, one: Party, gone: tuple[int, ...], has_died: bool, sources: Sources
) -> Cause | None:
    meeting = wait.meeting
    if meeting is None:
        return None
    other = make_party(view, meeting.progress, gone, meeting.seq)
    if not has_died:
        other = replace(other, chain=(), entry=None)
    origin = _origin(view, meeting, one.ranks[0], gone[0], sources)
    cause = (find_cause(*origin, sources) if origin is not None else None) or find_cause(one, other, sources)
    if cause is None or (has_died and cause.code != "DDP212"):
        return None
    if cause.code == "DDP201":  # both ranks were in a collective where they split
        return Cause(code="DDP220", ranks=cause.ranks, why=cause.why, at=cause.at)
    return cause


def _origin(view: JobView, meeting: Meeting, one: int, other: int, sources: Sources) -> tuple[Party, Party] | None:
    if one not in meeting.progress.by_rank or other not in meeting.progress.by_rank:
        return None
    return find_origin(view, meeting.progress, one, other, meeting.seq, sources)


def _say_what(wait: Wait) -> str:
    if wait.meeting is None:
        return describe(next(iter(wait.held.values())))
    entry = wait.held[min(wait.held)]
    return f"{describe_shortly(entry)} (#{wait.meeting.seq} of {name_group(wait.meeting.progress.group)})"


def _show(view: JobView, wait: Wait, gone: Sequence[int], fates: Mapping[int, Fate]) -> tuple[str, ...]:
    rows = [(rank, describe(entry), say_place(entry.line)) for rank, entry in sorted(wait.held.items())]
    rows += [(rank, fates[rank].words, _say_last(wait, view, rank)) for rank in gone]
    return lay_out(merge_rows(rows))


def _say_last(wait: Wait, view: JobView, rank: int) -> str:
    chain = chain_of(view.ranks[rank], None) if rank in view.ranks and view.ranks[rank].error is not None else ()
    if chain:
        return say_place(chain[-1])
    last = wait.meeting.progress.last(rank) if wait.meeting is not None else None
    return f"its last was #{last.seq}: {say_call(last)}" if last is not None else ""


def _common(wait: Wait) -> tuple[str, ...]:
    return show_common(wait.meeting.progress, wait.meeting.seq) if wait.meeting is not None else ()


def _why(wait: Wait, ranks: Sequence[int], words: str, has_died: bool) -> str:
    if has_died:
        more = " (the kernel does that when memory is out; `dmesg` says so)" if "SIGKILL" in words else ""
        return f"{who_does(ranks, words)}{more}; what the others say after that follows from it"
    if wait.meeting is None:
        return f"{who_does(ranks, words)} without the other side of this"
    return f"{who_does(ranks, words)} without calling this: it has come to its end on another way, or with fewer rounds"


def explain_circle(view: JobView, circle: Sequence[Wait], sources: Sources) -> Finding:
    """Return the finding for ranks that wait for each other in a cycle: DDP206 for collectives, else DDP219."""
    code = "DDP206" if all(wait.meeting is not None for wait in circle) else "DDP219"
    held = {rank: entry for wait in circle for rank, entry in wait.held.items()}
    rows = [(rank, _describe_in(wait), say_place(entry.line)) for wait in circle for rank, entry in wait.held.items()]
    parties = [_party(view, wait, tuple(sorted(wait.held))) for wait in circle[:2]]
    cause = find_cause(parties[0], parties[1], sources) if len(parties) == 2 and not _say_tags(circle) else None
    first = min(held)
    return make_finding(
        code,
        summary=_summarize_circle(code, circle),
        ranks=tuple(sorted(held)),
        line=place_of(parties[0].chain[-1]) if parties[0].chain else place_of(held[first].line),
        evidence=lay_out(merge_rows(rows)),
        why=_why_circle(circle) + (f"; {cause.why}" if cause is not None else ""),
        fix=_BRANCH_FIX if code == "DDP206" and cause is not None and cause.is_branch else FIXES[code],
    )


def _describe_in(wait: Wait) -> str:
    entry = next(iter(wait.held.values()))
    if wait.meeting is None:
        return describe(entry)
    return f"{describe(entry)}, #{wait.meeting.seq} of {_name(wait.meeting.progress)}"


def _name(progress: Progress) -> str:
    return name_group(progress.group)


def _summarize_circle(code: str, circle: Sequence[Wait]) -> str:
    if code == "DDP219":
        return "ranks wait for messages that no other rank sends or receives"
    groups = " and ".join(sorted({_name(wait.meeting.progress) for wait in circle if wait.meeting is not None}))
    return f"ranks wait for each other in {groups}"


def _it(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _wait_for(ranks: Collection[int]) -> str:
    return f"{render_ranks(ranks, max_chars=40)} {'waits' if len(ranks) == 1 else 'wait'} for"


def _why_circle(circle: Sequence[Wait]) -> str:
    parts = [f"{_wait_for(wait.held)} {render_ranks(wait.missing, max_chars=40)}" for wait in circle[:4]]
    return ", ".join(parts) + (_say_tags(circle) or ": nobody can be the first")


def _say_tags(circle: Sequence[Wait]) -> str:
    """Return a clause if one rank sends what the other receives under a different tag; empty otherwise."""
    if len(circle) != 2 or any(wait.meeting is not None for wait in circle):
        return ""
    one, other = (next(iter(wait.held.values())) for wait in circle)
    if {one.op, other.op} != {"send", "recv"} or tag_of(one) == tag_of(other):
        return ""
    sent, received = (one, other) if one.op == "send" else (other, one)
    return f": what is sent with tag {sent.tag} is received with tag {received.tag}, and tags have to be the same"
