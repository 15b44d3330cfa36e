# SPDX-License-Identifier: Apache-2.0
"""Find ranks that wait in init_process_group: which ranks are missing, and whether they can still arrive.

It cannot complete if WORLD_SIZE exceeds the number of ranks, or if two ranks use the same RANK.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.module_names import FORM_GROUP, JOIN_GROUP
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.activity import NOT_CALLED, describe_activity, render_where
from ddpilot.watch.explain.text import Draft, merge_rows, place_of, ranks_do, render_place, render_table
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from ddpilot.watch.snapshot.stacks import innermost, passes

_STACK_AGE_NS = 5_000_000_000
_ALL_INSIDE_NS = 10_000_000_000
"""All ranks being in init_process_group is reported this long after the start, or after they left a group."""
_STARTS_NS = 10_000_000_000
"""How long ranks may import and join before a status line shows how many have joined."""
_SETTLED_NS = 1_000_000_000
"""A rank that is still seen entering a group this long after a different rank has returned will not complete it."""
_MAX_STACKS = 64
_MAX_WORLD_SIZE = 1 << 16
_TORCH = (":init_process_group", "/rendezvous.py:")
_DDPILOT = (FORM_GROUP, JOIN_GROUP)
_IMPORTS = "<frozen importlib._bootstrap>:"
_NO_TORCH = "not imported torch yet"
_IN_TORCH = "waits in init_process_group"
_AT_FIRST_USE = "waits to enter the process group"


def explain_group_init(draft: Draft) -> None:
    """Examine ranks that are in no group: those in init_process_group, and those that they wait for."""
    job = draft.job
    logs = {rank: seen.log for rank, seen in job.ranks.items() if seen.log is not None}
    fresh = [rank for rank, log in logs.items() if not log.num_begun or log.left_ns is not None]
    alive = [rank for rank in fresh if not draft.outcomes[rank].is_gone and _age_ns(job, rank) > draft.stall_ns]
    stacks = {rank: job.ranks[rank].stack for rank in alive}
    old = [rank for rank, stack in stacks.items() if stack is None or job.now_ns - stack.taken_ns > _STACK_AGE_NS]
    draft.needs.update(old[:_MAX_STACKS])
    if _explain_unused_ranks(draft):
        return
    inside = [rank for rank in alive if _is_inside(job.ranks[rank])]
    if inside and len(inside) == job.world_size:
        _explain_all_inside(draft, inside)
    elif inside:
        _explain_missing(draft, inside, [rank for rank in range(job.world_size) if rank not in inside])


def _explain_missing(draft: Draft, inside: list[int], absent: list[int]) -> None:
    job = draft.job
    gone = [rank for rank in absent if draft.outcomes[rank].is_gone]
    if _is_outdated(job, inside, absent) or not _is_settled(draft, inside, gone):
        draft.needs.update(inside[:_MAX_STACKS])
        return
    waited_ns = max(_age_ns(job, rank) for rank in inside)
    elsewhere = {rank: _render_elsewhere(draft, rank) for rank in absent}
    # Imports may take minutes: the status shows which ranks are importing. The time after them counts separately.
    starts = {rank: _render_start(job, rank) for rank in absent}
    is_slow = any(starts.values()) or not _is_session(job, inside)
    if gone or waited_ns > (_STARTS_NS if is_slow else draft.stall_ns):
        draft.add_status(_render_joined(job, len(inside), elsewhere))
    is_starting = all(starts[rank] or 0 < _age_ns(job, rank) < draft.warn_ns for rank in absent)
    if gone or (waited_ns > draft.warn_ns and not is_starting):
        rows = [(rank, _render_inside(job.ranks[rank]), render_place(_line(job, rank))) for rank in inside]
        rows += [(rank, *texts) for rank, texts in elsewhere.items()]
        missing = gone or absent
        draft.add_proven(_explain_rendezvous(job, inside, missing, render_table(rows), is_proven=bool(gone)), missing)


def _is_session(job: JobSnapshot, inside: list[int]) -> bool:
    """True if the ranks were running before the period under examination: what is started already joins at once."""
    return all((log := job.ranks[rank].log) is not None and log.started_ns < job.since_ns for rank in inside)


def _is_settled(draft: Draft, inside: list[int], gone: list[int]) -> bool:
    """Return False if a rank of `gone` has only just returned: the ranks `inside` may be about to join the group."""
    job, earlier = draft.job, draft.earlier
    living = [rank for rank in gone if job.ranks[rank].returned and job.ranks[rank].process.state == "running"]
    if not living:
        return True
    if earlier is None or not all(rank in earlier.ranks and earlier.ranks[rank].returned for rank in living):
        return False
    stacks = [stack for rank in inside if (stack := job.ranks[rank].stack) is not None]
    return all(stack.taken_ns - earlier.now_ns >= _SETTLED_NS for stack in stacks)


def _render_joined(job: JobSnapshot, num_inside: int, elsewhere: Mapping[int, tuple[str, str]]) -> str:
    """Format how many ranks have joined, and where most of the others are if a line is known."""
    line = f"{num_inside} of {job.world_size} ranks have joined the group"
    rows = merge_rows((rank, *texts) for rank, texts in elsewhere.items())
    others = [(ranks, what, where) for ranks, what, where in rows if where or _NO_TORCH in what]
    return line + "".join(f"; {ranks} {what}{f': {where}' if where else ''}" for ranks, what, where in others[:1])


def _is_outdated(job: JobSnapshot, inside: list[int], absent: list[int]) -> bool:
    """True if the stacks of the ranks `inside` are older than the end of an absent rank, or a collective with it.

    The ranks may have joined the group since.
    """
    for rank in absent:
        seen = job.ranks.get(rank)
        log = seen.log if seen is not None else None
        ended_ns = (seen.process.ended_ns if seen is not None else None) or (log.closed_ns if log is not None else None)
        for other in inside:
            stack = job.ranks[other].stack
            if stack is not None and ended_ns is not None and stack.taken_ns < ended_ns:
                return True
            if log is not None and _has_completed_with(log, other, job.now_ns - _age_ns(job, other)):
                return True
    return False


def _has_completed_with(log: RankLog, other: int, since_ns: int) -> bool:
    """True if the rank of `log` has completed a collective with the rank `other` since `since_ns`."""
    return any(
        entry.state == "done" and entry.start_ns > since_ns and entry.group is not None and other in entry.group.ranks
        for entry in reversed(log.collectives)
    )


def _explain_unused_ranks(draft: Draft) -> bool:
    """Report that all ranks are in init_process_group, or were when they ended, and that no rank uses some numbers.

    Returns False if that is not so.
    """
    job = draft.job
    asking = {
        rank: seen.log for rank, seen in job.ranks.items() if seen.log is not None and seen.log.entering_ns is not None
    }
    if not asking or len(asking) < job.world_size:
        return False
    world_size = min(max(log.asked_world_size for log in asking.values()), _MAX_WORLD_SIZE)
    unused = sorted(set(range(world_size)) - {log.asked_rank for log in asking.values()})
    waited_ns = job.now_ns - max(log.entering_ns or 0 for log in asking.values())
    if not unused or waited_ns < draft.stall_ns:
        return bool(unused)
    line = next((line for rank in asking if (line := _line(job, rank)) is not None), None)
    who, missing, where = ranks_do(asking, _IN_TORCH), f"no process is {render_ranks(unused)}", render_place(line)
    if not any(draft.outcomes[rank].is_gone for rank in asking):
        draft.add_status(f"the group is not complete: {missing}; {who}: {where}")
    # No other process can join if each rank has no child processes and uses its launcher's store.
    is_proven = all(log.is_closed for log in asking.values())
    if not (is_proven or waited_ns > draft.warn_ns):
        return True
    why = "each rank of a group needs a different number, and several use the same one"
    if unused[-1] >= job.world_size:
        why = f"the group needs {unused[-1] + 1} ranks, and {job.world_size} were started"
    if not is_proven:
        why += "; a further process may still join, such as one that a rank has started"
    calls = {rank: f"calls it as rank {log.asked_rank} of {log.asked_world_size}" for rank, log in asking.items()}
    finding = make_finding(
        "DDP105",
        severity="error" if is_proven else "warning",
        summary=f"{who}, and {missing}",
        ranks=tuple(asking),
        line=place_of(line),
        evidence=render_table((rank, words, where) for rank, words in calls.items()),
        why=why,
        fix="omit `world_size=` and `rank=`, so that the launcher's values apply, or start that many ranks",
    )
    draft.add_proven(finding, finding.ranks)
    return True


def _is_inside(rank: RankSnapshot | None) -> bool:
    stack = rank.stack if rank is not None else None
    return passes(stack, *_TORCH, *_DDPILOT) is not None


def _render_inside(rank: RankSnapshot) -> str:
    return _IN_TORCH if passes(rank.stack, *_DDPILOT) is None else _AT_FIRST_USE


def _is_in_group(rank: RankSnapshot | None) -> bool:
    """True if the rank has begun collectives in a group and has not left it."""
    log = rank.log if rank is not None else None
    return log is not None and log.num_begun > 0 and log.left_ns is None


def _explain_all_inside(draft: Draft, inside: list[int]) -> None:
    job = draft.job
    waited_ns = min(_age_ns(job, rank) for rank in inside)
    if waited_ns < _ALL_INSIDE_NS or not all(_is_inside(draft.before(rank)) for rank in inside):
        return
    line = _line(job, inside[0])
    draft.add_status(f"all ranks are in init_process_group at {render_place(line)}, and it does not end")
    logs = [job.ranks[rank].log for rank in inside]
    if waited_ns < draft.warn_ns or not all(log is not None and log.left_ns for log in logs):
        return  # before the first group it is unknown for how long they have been there
    finding = make_finding(
        "DDP215",
        summary="all ranks are in init_process_group, after they have destroyed a group, and it does not end",
        ranks=tuple(inside),
        line=place_of(line),
        why="a faster rank has read addresses of the old group from the store, or has destroyed the store with it",
        fix="call dist.barrier() before destroy_process_group and give the new group its own store or port; "
        "or keep the group; ddpilot.init_group() can be entered repeatedly",
    )
    draft.add_proven(finding, inside)


def _explain_rendezvous(
    job: JobSnapshot, inside: list[int], missing: list[int], evidence: tuple[str, ...], *, is_proven: bool
) -> Finding:
    summary = f"{ranks_do(inside, 'waits in init_process_group')} for {render_ranks(missing)}"
    why = "a group is complete when all ranks have called init_process_group: these have not"
    fix = "check why: an earlier error, a different WORLD_SIZE or address, or a branch on the rank"
    if _render_inside(job.ranks[inside[0]]) == _AT_FIRST_USE:
        summary = f"{ranks_do(inside, 'waits')} for {render_ranks(missing)} to enter the process group"
        why = "the group is entered at the first collective and is complete when all ranks have called one"
        fix = "call the collective on all ranks: check for a branch on the rank, or an earlier error"
    left = [rank for rank in inside if (log := job.ranks[rank].log) is not None and log.left_ns is not None]
    if left and all(_is_in_group(job.ranks.get(rank)) for rank in missing):
        why = f"{render_ranks(left)} left the process group, {render_ranks(missing)} did not; a new one needs all ranks"
        fix = "call destroy_process_group on all ranks or on none"
    return make_finding(
        "DDP215",
        severity="error" if is_proven else "warning",
        summary=summary,
        ranks=tuple(missing),
        line=place_of(_line(job, inside[0])),
        evidence=evidence,
        why=why,
        fix=fix,
    )


def _age_ns(job: JobSnapshot, rank: int) -> int:
    seen = job.ranks.get(rank)
    log = seen.log if seen is not None else None  # the digest of a different node may not have arrived yet
    return job.now_ns - max(log.left_ns or log.started_ns, job.since_ns) if log is not None else 0


def _line(job: JobSnapshot, rank: int) -> CodeLine | None:
    return innermost(job.ranks[rank].stack)


def _render_elsewhere(draft: Draft, rank: int) -> tuple[str, str]:
    seen, outcome = draft.job.ranks.get(rank), draft.outcomes[rank]
    if seen is None or outcome.state == "unknown":
        return "is not visible here", ""
    if outcome.is_gone:
        return outcome.words, ""
    activity = describe_activity(seen, draft.before(rank), draft.job.now_ns)
    words = "has not joined it" if activity.words == NOT_CALLED else activity.words
    return _render_start(draft.job, rank) or words, render_where(activity)


def _render_start(job: JobSnapshot, rank: int) -> str:
    """Return what a starting rank is doing; empty for a rank that has started."""
    seen = job.ranks.get(rank)
    if seen is None or seen.process.state != "running":
        return ""
    if seen.log is None:
        return f"has {_NO_TORCH}"
    return "is importing" if passes(seen.stack, _IMPORTS) is not None else ""
