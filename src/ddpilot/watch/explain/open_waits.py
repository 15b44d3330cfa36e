# SPDX-License-Identifier: Apache-2.0
"""Explain waits for live ranks: cycles, unequal messages, and waits that may still end.

The last are a status line, later a warning; they never end a job on their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.activity import Activity, describe_activity, render_where
from ddpilot.watch.explain.missed_collective import FIXES, find_cause, show_common, side_in_wait
from ddpilot.watch.explain.text import (
    Draft,
    describe,
    describe_shortly,
    lay_out,
    name_group,
    place_of,
    ranks_do,
    render_death,
    render_duration,
    render_place,
    render_position,
    render_table,
    rows_of,
)
from ddpilot.watch.matching.waits import Message, Wait, tag_of
from ddpilot.watch.snapshot.model import JobSnapshot
from ddpilot.watch.snapshot.stacks import passes


def render_open_wait(draft: Draft, wait: Wait, absent: Sequence[int]) -> str:
    """Return one line: which ranks wait, where and for how long, which ranks are absent, and what these do.

    `absent`: those that are elsewhere; empty if all have arrived or none is known.
    """
    position = render_position(wait.held[min(wait.held)].line)
    at = f" at {position}" if position else ""
    waited, others = _render_waited(draft, wait), _render_absent(draft, wait, absent)
    return f"{ranks_do(wait.held, 'has')} waited {waited} in {render_wait(wait)}{at}; {others}"


def _render_waited(draft: Draft, wait: Wait) -> str:
    return render_duration(draft.job.now_ns - wait.since_ns)


def _activities(draft: Draft, absent: Sequence[int]) -> list[tuple[int, Activity]]:
    """Return what each absent rank does."""
    job = draft.job
    seen = [job.ranks[rank] for rank in absent if rank in job.ranks]
    return [(each.rank, describe_activity(each, draft.before(each.rank), job.now_ns)) for each in seen]


def render_wait(wait: Wait) -> str:
    """Format the operation that ranks wait in, such as ``barrier (#1 of the default group)``."""
    entry, collective = wait.held[min(wait.held)], wait.collective
    if collective is None:
        return describe(entry)
    return f"{describe_shortly(entry)} (#{collective.seq} of {name_group(collective.progress.group)})"


def _render_absent(draft: Draft, wait: Wait, absent: Sequence[int]) -> str:
    if not absent:
        return (
            f"the state of {render_ranks(wait.unknown)} is not known here"
            if wait.unknown
            else "all ranks have called it, and it does not complete: their connection may be blocked"
        )
    by_words: dict[str, list[int]] = {}
    for rank, activity in _activities(draft, absent):
        where = render_where(activity)
        by_words.setdefault(f"{activity.words}: {where}" if where else activity.words, []).append(rank)
    texts = [ranks_do(ranks, words, max_chars=40) for words, ranks in list(by_words.items())[:3]]
    more = f" and {len(by_words) - 3} more" if len(by_words) > 3 else ""
    return "; ".join(texts) + more


def explain_open_wait(draft: Draft, wait: Wait, absent: Sequence[int], *, has_lasted: bool) -> Finding | None:
    """Return a warning once the wait `has_lasted`, an error if an absent rank is provably stuck, else None.

    An absent rank is stuck if it is in a call that itself needs the waiting ranks.
    """
    activities = _activities(draft, absent)
    proven = next(((rank, each) for rank, each in activities if _is_proven(draft.job, wait, rank, each)), None)
    if not has_lasted and proven is None:
        return None
    if not activities:
        return _explain_full(draft, wait) if not wait.unknown else None
    rank, first = proven or activities[0]
    alike = tuple(other for other, activity in activities if activity.code == first.code) if proven is None else (rank,)
    entry = wait.held[min(wait.held)]
    rows = rows_of(wait.held)
    rows += [(rank, activity.words, render_where(activity)) for rank, activity in activities]
    return make_finding(
        first.code,
        severity="error" if proven is not None else None,
        summary=f"{render_waiting_for(wait.held)} {render_ranks(alike)} in {describe_shortly(entry)}",
        ranks=alike,
        line=place_of(first.at) or place_of(entry.line),
        evidence=(*render_table(rows), *show_common(wait.collective), _render_how_long(draft, wait)),
        why=first.why,
        fix=first.fix,
    )


def _render_how_long(draft: Draft, wait: Wait) -> str:
    # Not part of the summary, by which repeated findings are recognized.
    return f"waiting for {_render_waited(draft, wait)}"


def _is_proven(job: JobSnapshot, wait: Wait, rank: int, activity: Activity) -> bool:
    """True if the rank is in a call that needs the waiting ranks: creating a group, or destroying all groups."""
    group = wait.collective.progress.group if wait.collective is not None else None
    if group is None or activity.at is None or job.ranks[rank].stack is None:
        return False
    if activity.moves == "moves":
        return False  # its stack is newer than its log: it may have passed the awaited collective
    if activity.code == "DDP216":
        return "destroy_process_group()" in activity.at.text
    is_making = passes(job.ranks[rank].stack, ":new_group") is not None
    return is_making and "use_local_sync" not in activity.at.text  # all ranks must call new_group, members or not


def _explain_full(draft: Draft, wait: Wait) -> Finding:
    entry = wait.held[min(wait.held)]
    return make_finding(
        "DDP218",
        summary=f"all ranks are in {describe_shortly(entry)}, and it does not complete",
        ranks=tuple(sorted(wait.held)),
        line=place_of(entry.line),
        evidence=(*render_table(rows_of(wait.held)), _render_how_long(draft, wait)),
        why="their arguments match, so the data does not get through: a network, a firewall, or a peer-to-peer link",
        fix="check the interfaces (NCCL_DEBUG=INFO; ddpilot explain DDP107, DDP108), and whether a rank was stopped",
    )


def explain_message(job: JobSnapshot, message: Message) -> Finding:
    """Return the finding for `message`, with the lines of both sides."""
    sides = ((message.sender, message.sent), (message.receiver, message.received))
    rows = [
        (f"rank {rank}", describe(entry) + render_death(job.ranks[rank]), render_place(entry.line))
        for rank, entry in sides
    ]
    gives, takes = f"{message.sent.num_bytes:,} bytes", f"{message.received.num_bytes:,}"
    return make_finding(
        "DDP202",
        # Over gloo, some programs allocate larger buffers on purpose, for messages of any size.
        severity="error" if message.sent.num_bytes > message.received.num_bytes else "warning",
        summary=f"rank {message.sender} sends {gives} to rank {message.receiver}, which has room for {takes}",
        ranks=(message.sender, message.receiver),
        line=place_of(message.received.line),
        evidence=lay_out(rows),
        why="gloo aborts a process whose tensor is too small, and leaves the rest of a larger tensor unchanged",
        fix="pass tensors of the same size and dtype to send and recv; if the size varies, send it first",
    )


_BRANCH_FIX = "call it on all ranks of its group: move it out of the branch; use groups in the same order on all ranks"


def explain_cycle(job: JobSnapshot, cycle: Sequence[Wait], sources: Sources) -> Finding:
    """Return the finding for ranks that wait for each other in a cycle: DDP206 for collectives, else DDP219."""
    code = "DDP206" if all(wait.collective is not None for wait in cycle) else "DDP219"
    held = {rank: entry for wait in cycle for rank, entry in wait.held.items()}
    rows = [(rank, _describe_in(wait), render_place(entry.line)) for wait in cycle for rank, entry in wait.held.items()]
    parties = [side_in_wait(job, wait, tuple(sorted(wait.held))) for wait in cycle[:2]]
    cause = find_cause(parties[0], parties[1], sources) if len(parties) == 2 and not _render_tags(cycle) else None
    first = min(held)
    parts = [f"{render_waiting_for(wait.held)} {render_ranks(wait.missing, max_chars=40)}" for wait in cycle[:4]]
    why = ", ".join(parts) + (_render_tags(cycle) or ": no rank can proceed")
    return make_finding(
        code,
        summary=_summarize_cycle(code, cycle),
        ranks=tuple(sorted(held)),
        line=place_of(parties[0].chain[-1]) if parties[0].chain else place_of(held[first].line),
        evidence=render_table(rows),
        why=why + (f"; {cause.why}" if cause is not None else ""),
        fix=_BRANCH_FIX if code == "DDP206" and cause is not None and cause.is_branch else FIXES[code],
    )


def _describe_in(wait: Wait) -> str:
    entry = next(iter(wait.held.values()))
    if wait.collective is None:
        return describe(entry)
    return f"{describe(entry)}, #{wait.collective.seq} of {name_group(wait.collective.progress.group)}"


def _summarize_cycle(code: str, cycle: Sequence[Wait]) -> str:
    if code == "DDP219":
        return "ranks wait for messages that no other rank sends or receives"
    groups = {name_group(wait.collective.progress.group) for wait in cycle if wait.collective is not None}
    return f"ranks wait for each other in {' and '.join(sorted(groups))}"


def render_waiting_for(ranks: Collection[int]) -> str:
    """Format the beginning of a sentence, such as ``ranks 0,1 wait for``."""
    return f"{render_ranks(ranks, max_chars=40)} {'waits' if len(ranks) == 1 else 'wait'} for"


def _render_tags(cycle: Sequence[Wait]) -> str:
    """Return a clause if one rank sends what the other receives under a different tag; empty otherwise."""
    if len(cycle) != 2 or any(wait.collective is not None for wait in cycle):
        return ""
    one, other = (next(iter(wait.held.values())) for wait in cycle)
    if {one.op, other.op} != {"send", "recv"} or tag_of(one) == tag_of(other):
        return ""
    sent, received = (one, other) if one.op == "send" else (other, one)
    return f": the send has tag {sent.tag} and the recv tag {received.tag}, and tags must be equal"
