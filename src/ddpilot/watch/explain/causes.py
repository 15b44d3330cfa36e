# SPDX-License-Identifier: Apache-2.0
"""Find the cause when two sets of ranks are not in the same collective, from their source and their logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective, DdpPart
from ddpilot.source.control_flow import DecisionPoint
from ddpilot.source.parsed_file import Chain, Sources
from ddpilot.source.split import Side, Split, find_split
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.text import (
    describe_shortly,
    say_call,
    say_spot,
    show_file,
    who_does,
)
from ddpilot.watch.matching.progress import GroupProgress
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from ddpilot.watch.snapshot.stacks import chain_of, chain_of_line

_FORWARD_PARTS = ("buffers", "bucket order")

FIXES = {
    "DDP201": "let all ranks call the same collectives in the same order: move what differs out of the branch",
    "DDP202": "give tensors of the same size on all ranks; where sizes differ, gather the sizes first and pad, or use "
    "all_gather_object",
    "DDP203": "convert to one dtype before the call, on all ranks (`tensor.to(torch.float32)`)",
    "DDP204": "use one reduce-op on all ranks; what was computed with two is wrong, so go back to before it",
    "DDP205": "name the same `src` or `dst` on all ranks: the root's rank, not this rank's",
    "DDP206": "use the groups in the same order on all ranks",
    "DDP207": "give every rank the same number of batches (DistributedSampler, `drop_last=True`, ddpilot's Loop), or "
    "run the loop in `with Join([model]):`",
    "DDP208": "decide on all ranks together: all_reduce the flag, and let all of them leave after the same step",
    "DDP210": "let the error end all ranks, or decide together to skip the batch (all_reduce a flag before backward)",
    "DDP211": "run `model.module(...)` there, which has no collective, or run the DDP model on all ranks",
    "DDP212": "use the same parameters on all ranks, add `0 * sum(p.sum() for p in model.parameters())` to the loss, "
    "or wrap with find_unused_parameters=True",
    "DDP216": "let all ranks come to a barrier before destroy_process_group",
    "DDP219": "pair every send with a recv of the same peers and tag, in an order in which one side sends first, or "
    "use batch_isend_irecv",
    "DDP220": "call it on all ranks: move it out of the branch, or leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A set of ranks whose calls are the same."""

    ranks: tuple[int, ...]
    chain: Chain
    """The calls that lead to the collective, outermost first; empty at the end of the program."""
    entry: Collective | None = None
    """The collective the ranks are in; None if they never called it."""
    before: Collective | None = None
    """The collective they began before `entry` in the same group."""
    lines: frozenset[tuple[str, int]] = frozenset()
    """(file, line) of their earlier collectives in the same group."""
    error: str = ""
    """The message of the exception that ended their program; empty if there was none."""
    passes: Mapping[int, int] = field(default_factory=dict)
    """Number of passes they have started over each loader, as far as guard noted it; the newest loader is last."""
    knows_all_passes: bool = False
    """True if `passes` includes every pass they have started."""
    talk: bool = False
    """True if they have called the program's own collectives, by which ranks may have agreed on something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A named cause, with the line to look at."""

    code: str
    ranks: tuple[int, ...]
    """The ranks that differ from the others."""
    why: str
    at: CodeLine | None = None
    is_branch: bool = False
    """True if only some ranks take the branch, and the others do not take a different branch of the same condition."""
    fix: str = ""
    """What to do, if it differs from the usual fix for this code."""


def find_cause(one: Party, other: Party, sources: Sources) -> Cause | None:
    """Return why two sets of ranks are not in one collective; None if the cause cannot be determined."""
    parting = find_split(_side(one), _side(other), sources)
    for here, there in ((one, other), (other, one)):
        cause = _unused(here, there) or _lone_forward(here, there, parting)
        if cause is not None:
            return cause
    if parting is None:
        return None
    here, gone = (one, other) if other.ranks == parting.ranks else (other, one)
    if parting.handler is not None:
        return _handled(parting, here, gone)
    if parting.left is not None:
        return _left_function(parting, here, gone)
    if parting.loop is not None and _was_there(gone, here):
        return _left_loop(parting, here, gone)
    if parting.guard is not None:
        return _guarded(parting, one, other)
    return _skipped(parting, one) if parting.same_loop else None


def _side(party: Party) -> Side:
    return Side(party.ranks, party.chain, party.lines)


def _unused(here: Party, there: Party) -> Cause | None:
    """Report DDP212 if `here` is in a gradient bucket that `there` left out of the same backward pass."""
    part = _bucket_of(here.entry)
    if here.entry is None or part is None or _bucket_of(there.entry) is not None:
        return None
    before, last = there.before, _bucket_of(there.before)
    stopped_short = (
        before is not None
        and last is not None
        and (last.model, last.index, _spot_of(before)) == (part.model, (part.index or 0) - 1, _spot_of(here.entry))
    )
    if not (stopped_short or "Expected to have finished reduction" in there.error):
        return None
    names = ", ".join(part.names[:6]) + (f" and {part.num_parameters - 6} more" if part.num_parameters > 6 else "")
    who = render_ranks(there.ranks)
    why = f"the backward pass of {who} left out gradient bucket {part.index} ({names}): some of these parameters took "
    return Cause(code="DDP212", ranks=there.ranks, why=f"{why}no part in the loss of {who}", at=_at(here))


def _bucket_of(entry: Collective | None) -> DdpPart | None:
    part = entry.ddp if entry is not None else None
    return part if part is not None and part.what == "bucket" else None


def _lone_forward(here: Party, there: Party, parting: Split | None) -> Cause | None:
    """Report DDP211 if `here` runs a forward of a DDP model that `there` does not run."""
    part = here.entry.ddp if here.entry is not None else None
    if here.entry is None or part is None or part.what not in _FORWARD_PARTS:
        return None
    guard = parting.guard if parting is not None and parting.ranks == here.ranks else None
    spot = _spot_of(here.entry)
    is_new = spot not in here.lines and spot not in there.lines and bool(here.lines)
    same_line = there.entry is not None and _spot_of(there.entry) == spot
    if same_line or not (guard is not None or is_new):
        return None
    who = render_ranks(here.ranks)
    inside = f", inside {_say(parting, guard)}" if parting is not None and guard is not None else ""
    what = "broadcasts its buffers" if part.what == "buffers" else "broadcasts its order of buckets"
    why = (
        f"the forward of a DDP model {what} to all ranks, and only {who} runs the one at {say_spot(_at(here))}{inside}"
    )
    return Cause(code="DDP211", ranks=here.ranks, why=why, at=_at(here))


def _spot_of(entry: Collective) -> tuple[str, int]:
    return entry.line.position if entry.line is not None else ("", 0)


def _was_there(gone: Party, here: Party) -> bool:
    """True if the departed ranks were in the loop before: they have run one of its lines."""
    return bool(gone.lines & here.lines) if here.lines else True


def _left_loop(parting: Split, here: Party, gone: Party) -> Cause | None:
    if parting.outer is not None and _is_unexplained(parting) and _left_outside(here, gone):
        parting = parting.outer
    assert parting.loop is not None
    who, loop = render_ranks(gone.ranks), _say(parting, parting.loop)
    handling = parting if parting.swallower is not None or parting.exit is not None else parting.swallowed
    if handling is not None and handling.swallower is not None:
        spot = _say(handling, handling.swallower)
        why = (
            f"{who} came to the end of {loop} with fewer rounds: {spot} continued after an error that the other ranks "
            "did not have"
        )
        return Cause(code="DDP210", ranks=gone.ranks, why=why, at=_at(here))
    if parting.exit is not None:
        spot = _say(parting, parting.exit)
        why = f"{who} left {loop} earlier than {render_ranks(here.ranks)}: {spot} is decided by each rank for itself"
        if parting.exit.line == parting.loop.line:
            why = f"{loop} ended earlier on {who} than on {render_ranks(here.ranks)}: each rank decides for itself"
        return Cause(code="DDP208", ranks=gone.ranks, why=why, at=_at(here))
    if parting.skip is not None:
        spot = _say(parting, parting.skip)
        why = f"{who} came to the end of {loop} with fewer rounds: {spot} is decided by each rank for itself"
        return Cause(code="DDP210", ranks=gone.ranks, why=why, at=_at(here))
    if parting.unsynced is not None:
        spot = _say(parting, parting.unsynced)
        why = f"{who} came to the end of {loop} with fewer exchanges of gradients: each rank decides for itself what"
        return Cause(code="DDP201", ranks=gone.ranks, why=f"{why} {spot} is in a round", at=_at(here))
    if parting.same_rounds and gone.entry is not None:
        return None  # it has completed the loop, or the others have started the loop again
    if parting.same_rounds:
        why = f"{who} left {loop} before its end: it has as many rounds on all ranks"
        return Cause(code="DDP208", ranks=gone.ranks, why=why, at=_at(here))
    others = render_ranks(here.ranks)
    if parting.is_endless and parting.data_end is None:
        why = f"{who} left {loop}, which has no end of its own, earlier than {others}: what is called"
        return Cause(code="DDP208", ranks=gone.ranks, why=f"{why} in it, or an error, led out of it", at=_at(here))
    why = f"{loop} ended earlier on {who}: it had fewer rounds, as with fewer batches, than on {others}"
    if parting.data_end is not None and parting.data_end.line != parting.loop.line:
        why += f"; it ends with its data at {_say(parting, parting.data_end)}"
    return Cause(code="DDP207", ranks=gone.ranks, why=why, at=_at(here))


def _is_unexplained(parting: Split) -> bool:
    return (parting.swallower or parting.swallowed or parting.exit or parting.skip or parting.unsynced) is None


def _left_outside(here: Party, gone: Party) -> bool:
    """Return True if the ranks split at an outer loop, not at the loop over data.

    That is so if `here` has started another pass over the data. If passes are unknown: True unless either side has
    called the program's own collectives.
    """
    loader, number = next(reversed(list(here.passes.items())), (0, 0))
    if loader in gone.passes:
        return number > gone.passes[loader]
    if here.passes and gone.knows_all_passes:
        return True
    return not (here.talk or gone.talk)


def _handled(parting: Split, here: Party, gone: Party) -> Cause:
    assert parting.handler is not None
    who, others = render_ranks(gone.ranks), render_ranks(here.ranks)
    reason = "an error" if parting.handler.text.startswith("except") else "an error or an early exit"
    spot = ("the end of " if "with " in parting.handler.text else "") + _say(parting, parting.handler)
    why = f"{who} came to {spot} by {reason} that {others} had not: what it calls there the others call later"
    return Cause(code="DDP210", ranks=gone.ranks, why=why, at=_at(gone))


def _left_function(parting: Split, here: Party, gone: Party) -> Cause:
    assert parting.left is not None
    what = f"the {describe_shortly(here.entry)}" if here.entry is not None else "what the others do"
    spot = _say(parting, parting.left)
    why = f"{render_ranks(gone.ranks)} did not come to {what} at {say_spot(_at(here))}: {spot} may have left before"
    return Cause(code="DDP201" if gone.entry is not None else "DDP220", ranks=gone.ranks, why=why, at=_at(here))


def _guarded(parting: Split, one: Party, other: Party) -> Cause:
    assert parting.guard is not None
    here, there = (one, other) if one.ranks == parting.ranks else (other, one)
    what = f"the {describe_shortly(here.entry)}" if here.entry is not None else f"what {who_does(here.ranks, 'does')}"
    spot = _say(parting, parting.guard)
    behind = "inside" if not parting.guard.is_else else "where this is false:"
    via = ""
    if parting.at is not None and here.chain and parting.at.line != here.chain[-1].line:
        via = f", called at {say_spot(parting.at)},"
    rest = (
        f"{render_ranks(there.ranks)} went on to {say_spot(_at(there))}" if there.chain else "the others do not call it"
    )
    why = f"{what} at {say_spot(_at(here))}{via} is {behind} {spot}; {rest}"
    code = "DDP201" if there.entry is not None else "DDP220"
    return Cause(code=code, ranks=here.ranks, why=why, at=_at(here), is_branch=not parting.are_siblings)


def _skipped(parting: Split, one: Party) -> Cause | None:
    spot = parting.swallower or parting.skip
    if spot is None:
        return None
    reason = "continues after an error" if parting.swallower is not None else "is decided by each rank for itself"
    why = f"the ranks are at different points of one loop: {_say(parting, spot)} {reason}, so that some of "
    return Cause(code="DDP210", ranks=parting.ranks, why=f"{why}them skip part of a round", at=_at(one))


def _say(parting: Split, spot: DecisionPoint) -> str:
    text = spot.text.partition("  #")[0].strip()
    return f"`{text}` ({show_file(parting.file)}:{spot.line})"


def _at(party: Party) -> CodeLine | None:
    if party.chain:
        return party.chain[-1]
    return party.entry.line if party.entry is not None else None


_NUM_SAME = 32
"""After this many collectives from the same lines on all ranks, an earlier split no longer counts as the origin."""


def show_common(progress: GroupProgress, seq: int) -> tuple[str, ...]:
    """Return a line about the collective before `seq` that all ranks share; empty if the logs do not hold it."""
    entries = [entry for rank in progress.by_rank if (entry := progress.at(rank, seq - 1)) is not None]
    if not entries or len(entries) < len(progress.by_rank):
        return ()
    if len({(entry.op, entry.line and entry.line.position) for entry in entries}) > 1:
        return ()  # different calls that were matched by their number
    return (f"in common until #{seq - 1}: {say_call(entries[0])}",)


def make_party(
    view: JobSnapshot, progress: GroupProgress, ranks: tuple[int, ...], seq: int, *, stacks: bool = True
) -> Party:
    """Build the party of `ranks` in collective `seq` from the first of them that has called it, or from the first."""
    rank = next((each for each in ranks if progress.at(each, seq) is not None), ranks[0])
    entry = progress.at(rank, seq)
    earlier = [each for each in progress.by_rank.get(rank, ()) if each.seq is not None and each.seq < seq]
    lines = frozenset(each.line.position for each in earlier if each.line is not None)
    seen = view.ranks.get(rank)
    chain = chain_of(seen, entry) if seen is not None and stacks else ()
    if not chain and entry is not None:
        chain = chain_of_line(entry.line)
    error = seen.error.message if seen is not None and seen.error is not None else ""
    before = earlier[-1] if earlier else None
    return Party(
        ranks=ranks,
        chain=chain,
        entry=entry,
        before=before,
        lines=lines,
        error=error,
        passes=_passes_of(seen),
        knows_all_passes=seen is not None and any(note.index <= 1 for note in seen.journal[:1]),
        talk=any(each.ddp is None and each.op != "barrier" for each in earlier),
    )


def _passes_of(rank: RankSnapshot | None) -> dict[int, int]:
    found: dict[int, int] = {}
    for note in rank.journal if rank is not None else ():
        if note.kind == "loader_pass":
            found.pop(note.values["loader"], None)
            found[note.values["loader"]] = note.values["pass"]
    return found


def find_origin(
    view: JobSnapshot, progress: GroupProgress, one: int, other: int, seq: int, sources: Sources
) -> tuple[Party, Party] | None:
    """Find where two ranks first called collectives from different lines, which may have caused the mismatch at `seq`.

    Returns their parties there; None if the lines do not differ, or the logs do not reach back far enough.
    """
    start = max(_first_seq(progress, one), _first_seq(progress, other))
    found, same = None, 0
    for number in range(seq - 1, start - 1, -1):
        pair = (progress.at(one, number), progress.at(other, number))
        if pair[0] is None or pair[1] is None or same > _NUM_SAME:
            break
        if _site(pair[0]) == _site(pair[1]) or _are_siblings(pair[0], pair[1], sources):
            same += 1
        else:
            found, same = number, 0
    if found is None or (found == start and start > 0):
        return None
    return tuple(make_party(view, progress, (rank,), found, stacks=False) for rank in (one, other))  # type: ignore[return-value]


def _first_seq(progress: GroupProgress, rank: int) -> int:
    entries = progress.by_rank.get(rank)
    return entries[0].seq or 0 if entries else 0


def _site(entry: Collective) -> tuple[object, ...]:
    part = entry.ddp
    return (*(frame.position for frame in chain_of_line(entry.line)), part and (part.what, part.index))


def _are_siblings(one: Collective, other: Collective, sources: Sources) -> bool:
    """True if the two call paths split at different branches of one condition, as the two sides of a broadcast may."""
    ways = zip(chain_of_line(one.line), chain_of_line(other.line), strict=False)
    parted = ((first, second) for first, second in ways if first.position != second.position)
    first, second = next(parted, (None, None))
    source = sources.find(first) if first is not None else None
    if source is None or first is None or second is None or first.file != second.file:
        return False
    nodes = {id(block.node): block.part for block in source.blocks(first.line)}
    return any(nodes.get(id(block.node), block.part) != block.part for block in source.blocks(second.line))


def make_waiting_party(view: JobSnapshot, wait: Wait, held: tuple[int, ...]) -> Party:
    """Build the party of the ranks `held` in `wait`."""
    if wait.meeting is not None:
        return make_party(view, wait.meeting.progress, held, wait.meeting.seq)
    entry, log = wait.held[held[0]], view.ranks[held[0]].log
    entries = (*(each for each in (log.collectives if log is not None else ()) if each.is_p2p), entry)
    lines = frozenset(each.line.position for each in entries if each.line is not None)
    return Party(ranks=held, chain=chain_of(view.ranks[held[0]], entry), entry=entry, lines=lines)
