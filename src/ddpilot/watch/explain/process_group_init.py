# SPDX-License-Identifier: Apache-2.0
"""Find ranks that wait in init_process_group: which ranks are missing, and whether they can still arrive.

It cannot complete if WORLD_SIZE exceeds the number of ranks, or if two ranks use the same RANK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.module_names import FORM_GROUP, JOIN_GROUP
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.activity import NOT_CALLED, describe_activity, render_where
from ddpilot.watch.explain.text import lay_out, merge_rows, place_of, ranks_do, render_place, render_table
from ddpilot.watch.matching.outcomes import RankOutcome
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
_TORCH = (":init_process_group", "/rendezvous.py:")
_DDPILOT = (FORM_GROUP, JOIN_GROUP)
_IMPORTS = "<frozen importlib._bootstrap>:"
_NO_TORCH = "not imported torch yet"
_IN_TORCH = "waits in init_process_group"
_AT_FIRST_USE = "waits to enter the process group"


@dataclass(slots=True)
class Rendezvous:
    """Status lines and findings about ranks that wait in init_process_group."""

    status: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    needs_stacks: list[int] = field(default_factory=list)


def find_rendezvous(
    job: JobSnapshot, earlier: JobSnapshot | None, outcomes: Mapping[int, RankOutcome], stall_ns: int, warn_ns: int
) -> Rendezvous:
    """Examine ranks that are in no group: those in init_process_group, and those that they wait for."""
    found = Rendezvous()
    logs = {rank: seen.log for rank, seen in job.ranks.items() if seen.log is not None}
    fresh = [rank for rank, log in logs.items() if not log.num_begun or log.left_ns is not None]
    alive = [rank for rank in fresh if not outcomes[rank].is_gone and _age_ns(job, rank) > stall_ns]
    found.needs_stacks = [rank for rank in alive if _is_old(job, rank)][:_MAX_STACKS]
    unused = find_unused_ranks(job)
    if unused is not None:
        _add_unused_ranks(found, unused, outcomes, stall_ns, warn_ns)
        return found
    inside = [rank for rank in alive if _is_inside(job.ranks[rank])]
    if not inside:
        return found
    if len(inside) == job.world_size:
        _add_all_inside(found, job, earlier, inside, warn_ns)
        return found
    absent = [rank for rank in range(job.world_size) if rank not in inside]
    gone = [rank for rank in absent if outcomes[rank].is_gone]
    if _is_outdated(job, inside, absent) or not _is_settled(job, earlier, inside, gone):
        found.needs_stacks = inside[:_MAX_STACKS]
        return found
    waited_ns = max(_age_ns(job, rank) for rank in inside)
    elsewhere = {rank: _render_elsewhere(job, earlier, outcomes, rank) for rank in absent}
    rows = [(rank, _render_inside(job.ranks[rank]), render_place(_line(job, rank))) for rank in inside]
    merged = merge_rows([*rows, *((rank, *texts) for rank, texts in elsewhere.items())])
    # Imports may take minutes: the status shows which ranks are importing. The time after them counts separately.
    starts = {rank: _render_start(job, rank) for rank in absent}
    is_slow = any(starts.values()) or not _is_session(job, inside)
    if gone or waited_ns > (_STARTS_NS if is_slow else stall_ns):
        found.status.append(_render_joined(job, len(inside), elsewhere))
    is_starting = all(starts[rank] or 0 < _age_ns(job, rank) < warn_ns for rank in absent)
    if gone or (waited_ns > warn_ns and not is_starting):
        found.findings.append(_explain_rendezvous(job, inside, gone or absent, lay_out(merged), bool(gone)))
    return found


def _is_session(job: JobSnapshot, inside: list[int]) -> bool:
    """True if the ranks were running before the period under examination: what is started already joins at once."""
    return all((log := job.ranks[rank].log) is not None and log.started_ns < job.since_ns for rank in inside)


def _is_settled(job: JobSnapshot, earlier: JobSnapshot | None, inside: list[int], gone: list[int]) -> bool:
    """Return False if a rank of `gone` has only just returned: the ranks `inside` may be about to join the group."""
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


def _add_unused_ranks(
    found: Rendezvous, unused: UnusedRanks, outcomes: Mapping[int, RankOutcome], stall_ns: int, warn_ns: int
) -> None:
    if unused.waited_ns < stall_ns:
        return
    if not any(outcomes[rank].is_gone for rank in unused.asking):
        found.status.append(render_unused_ranks(unused))
    if unused.is_proven or unused.waited_ns > warn_ns:
        found.findings.append(explain_unused_ranks(unused))


def _is_inside(rank: RankSnapshot | None) -> bool:
    stack = rank.stack if rank is not None else None
    return passes(stack, *_TORCH, *_DDPILOT) is not None


def _render_inside(rank: RankSnapshot) -> str:
    return _IN_TORCH if passes(rank.stack, *_DDPILOT) is None else _AT_FIRST_USE


def _is_in_group(rank: RankSnapshot | None) -> bool:
    """True if the rank has begun collectives in a group and has not left it."""
    log = rank.log if rank is not None else None
    return log is not None and log.num_begun > 0 and log.left_ns is None


def _add_all_inside(
    found: Rendezvous, job: JobSnapshot, earlier: JobSnapshot | None, inside: list[int], warn_ns: int
) -> None:
    waited_ns = min(_age_ns(job, rank) for rank in inside)
    if waited_ns < _ALL_INSIDE_NS or earlier is None or not all(_is_inside(earlier.ranks.get(rank)) for rank in inside):
        return
    line = _line(job, inside[0])
    found.status.append(f"all ranks are in init_process_group at {render_place(line)}, and it does not end")
    logs = [job.ranks[rank].log for rank in inside]
    if waited_ns < warn_ns or not all(log is not None and log.left_ns for log in logs):
        return  # before the first group it is unknown for how long they have been there
    found.findings.append(
        make_finding(
            "DDP215",
            summary="all ranks are in init_process_group, after they have destroyed a group, and it does not end",
            ranks=tuple(inside),
            line=place_of(line),
            why="a faster rank has read addresses of the old group from the store, or has destroyed the store with it",
            fix="call dist.barrier() before destroy_process_group and give the new group its own store or port; "
            "or keep the group; ddpilot.init_group() can be entered repeatedly",
        )
    )


def _explain_rendezvous(
    job: JobSnapshot, inside: list[int], missing: list[int], evidence: tuple[str, ...], is_proven: bool
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


def _is_old(job: JobSnapshot, rank: int) -> bool:
    stack = job.ranks[rank].stack
    return stack is None or job.now_ns - stack.taken_ns > _STACK_AGE_NS


def _line(job: JobSnapshot, rank: int) -> CodeLine | None:
    return innermost(job.ranks[rank].stack)


def _render_elsewhere(
    job: JobSnapshot, earlier: JobSnapshot | None, outcomes: Mapping[int, RankOutcome], rank: int
) -> tuple[str, str]:
    seen = job.ranks.get(rank)
    if seen is None or outcomes[rank].state == "unknown":
        return "is not visible here", ""
    if outcomes[rank].is_gone:
        return outcomes[rank].words, ""
    activity = describe_activity(seen, earlier.ranks.get(rank) if earlier is not None else None, job.now_ns)
    words = "has not joined it" if activity.words == NOT_CALLED else activity.words
    return _render_start(job, rank) or words, render_where(activity)


def _render_start(job: JobSnapshot, rank: int) -> str:
    """Return what a starting rank is doing; empty for a rank that has started."""
    seen = job.ranks.get(rank)
    if seen is None or seen.process.state != "running":
        return ""
    if seen.log is None:
        return f"has {_NO_TORCH}"
    return "is importing" if passes(seen.stack, _IMPORTS) is not None else ""


_MAX_WORLD_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class UnusedRanks:
    """All ranks of `job` are in init_process_group, or were when they ended, and no rank uses `numbers`."""

    job: JobSnapshot
    asking: Mapping[int, RankLog]
    numbers: tuple[int, ...]

    @property
    def waited_ns(self) -> int:
        """Time since the last rank called init_process_group, in nanoseconds."""
        return self.job.now_ns - max(log.entering_ns or 0 for log in self.asking.values())

    @property
    def is_proven(self) -> bool:
        """True if no other process can join: each rank has no child processes and uses its launcher's store."""
        return all(log.is_closed for log in self.asking.values())

    @property
    def line(self) -> CodeLine | None:
        """The line that the ranks are at; None if it is unknown."""
        return next((line for rank in self.asking if (line := innermost(self.job.ranks[rank].stack)) is not None), None)


def find_unused_ranks(job: JobSnapshot) -> UnusedRanks | None:
    """Return the rank numbers that no rank uses although all have called init_process_group; None if there are none."""
    asking = {
        rank: seen.log for rank, seen in job.ranks.items() if seen.log is not None and seen.log.entering_ns is not None
    }
    if not asking or len(asking) < job.world_size:
        return None
    world_size = min(max(log.asked_world_size for log in asking.values()), _MAX_WORLD_SIZE)
    numbers = sorted(set(range(world_size)) - {log.asked_rank for log in asking.values()})
    return UnusedRanks(job, asking, tuple(numbers)) if numbers else None


def render_unused_ranks(unused: UnusedRanks) -> str:
    """Return one line that names the missing ranks."""
    missing = f"no process is {render_ranks(unused.numbers)}"
    return f"the group is not complete: {missing}; {_render_waiting(unused)}: {render_place(unused.line)}"


def _render_waiting(unused: UnusedRanks) -> str:
    return ranks_do(unused.asking, "waits in init_process_group")


def explain_unused_ranks(unused: UnusedRanks) -> Finding:
    """Return the finding: an error if it is proven, else a warning."""
    num_started, num_asked = unused.job.world_size, max(unused.numbers) + 1
    where = render_place(unused.line)
    rows = [
        (rank, f"calls it as rank {log.asked_rank} of {log.asked_world_size}", where)
        for rank, log in unused.asking.items()
    ]
    if num_asked > num_started:
        why = f"the group needs {num_asked} ranks, and {num_started} were started"
    else:
        why = "each rank of a group needs a different number, and several use the same one"
    if not unused.is_proven:
        why += "; a further process may still join, such as one that a rank has started"
    return make_finding(
        "DDP105",
        severity="error" if unused.is_proven else "warning",
        summary=f"{_render_waiting(unused)}, and no process is {render_ranks(unused.numbers)}",
        ranks=tuple(unused.asking),
        line=place_of(unused.line),
        evidence=render_table(rows),
        why=why,
        fix="omit `world_size=` and `rank=`, so that the launcher's values apply, or start that many ranks",
    )
