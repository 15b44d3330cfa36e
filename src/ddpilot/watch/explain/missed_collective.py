# SPDX-License-Identifier: Apache-2.0
"""Find the cause when two sets of ranks are not in the same collective, from their source and their logs."""

from __future__ import annotations

from dataclasses import dataclass

from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective, DdpPart
from ddpilot.source.control_flow import DecisionPoint
from ddpilot.source.parsed_file import Sources
from ddpilot.source.where_ranks_split import (
    BranchTaken,
    HandlerEntered,
    IterationSkipped,
    LoopLeft,
    Reason,
    ReturnedEarly,
    Side,
    Split,
    find_split,
)
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.text import describe_shortly, render_call, render_position, show_file
from ddpilot.watch.matching.progress import GroupCollective, GroupProgress
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from ddpilot.watch.snapshot.stacks import chain_of, chain_of_line

_FORWARD_PARTS = ("buffers", "bucket order")

FIXES = {
    "DDP201": "call the same collectives in the same order on all ranks: move what differs out of the branch",
    "DDP202": "pass tensors of the same size on all ranks; where sizes differ, gather the sizes first and pad, or use "
    "all_gather_object",
    "DDP203": "convert to one dtype before the call, on all ranks (`tensor.to(torch.float32)`)",
    "DDP204": "use one reduce-op on all ranks; results computed with two are wrong, so resume from before it",
    "DDP205": "pass the same `src` or `dst` on all ranks: the root's rank, not this rank's",
    "DDP206": "use the groups in the same order on all ranks",
    "DDP207": "divide the dataset with DistributedSampler or ddpilot's Loop; if each rank has its own data, run the "
    "loop in `with Join([model]):`, or stop all ranks after the smallest number of batches (all_reduce it with "
    "ReduceOp.MIN)",
    "DDP208": "decide on all ranks together: all_reduce the flag, and leave on all of them after the same step",
    "DDP210": "skip the batch on all ranks together (all_reduce a flag before backward); an error has to end all ranks",
    "DDP211": "run `model.module(...)` there, which calls no collective, or run the DDP model on all ranks",
    "DDP212": "use the same parameters on all ranks, add `0 * sum(p.sum() for p in model.parameters())` to the loss, "
    "or wrap with find_unused_parameters=True",
    "DDP216": "call a barrier on all ranks before destroy_process_group",
    "DDP219": "pair every send with a recv of the same peers and tag, in an order in which one side sends first, or "
    "use batch_isend_irecv",
    "DDP220": "call it on all ranks: move it out of the branch, or remove it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSide(Side):
    """A set of ranks with the same control flow, and what they do in one group."""

    entry: Collective | None = None
    """The collective the ranks are in; None if they never called it."""
    earlier: tuple[Collective, ...] = ()
    """The collectives that they began in the group before `entry`, oldest first."""
    seen: RankSnapshot | None = None
    """The rank that stands for all of them."""

    @property
    def calls_collectives(self) -> bool:
        """True if they have called collectives of the program's own, by which ranks may have agreed on something."""
        return any(each.ddp is None and each.op != "barrier" for each in self.earlier)

    @property
    def loader_passes(self) -> dict[int, int]:
        """Number of passes they have started over each loader, as far as guard noted it; the newest loader is last."""
        found: dict[int, int] = {}
        for note in self.seen.journal if self.seen is not None else ():
            if note.kind == "loader_pass":
                found.pop(note.values["loader"], None)
                found[note.values["loader"]] = note.values["pass"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A named cause, with the line that shows it."""

    code: str
    ranks: tuple[int, ...]
    """The ranks that differ from the others."""
    why: str
    at: CodeLine | None = None
    is_branch: bool = False
    """True if only some ranks take the branch, and the others do not take a different branch of the same condition."""
    fix: str = ""
    """The fix, if it differs from the usual fix for this code."""


def find_cause(one: CollectiveSide, other: CollectiveSide, sources: Sources) -> Cause | None:
    """Return why two sets of ranks are not in one collective; None if the cause cannot be determined."""
    split = find_split(one, other, sources)
    for here, there in ((one, other), (other, one)):
        cause = _unused(here, there) or _extra_forward(here, there, split)
        if cause is not None:
            return cause
    here, gone = (one, other) if split is not None and other.ranks == split.ranks else (other, one)
    match split:
        case HandlerEntered():
            return _handler_entered(split, here, gone)
        case ReturnedEarly():
            return _returned_early(split, here, gone)
        case LoopLeft():
            # If they have run one of its lines: the departed ranks were in the loop before.
            return _loop_left(split, here, gone) if not here.lines or gone.lines & here.lines else None
        case BranchTaken():
            return _branch_taken(split, gone, here)
        case IterationSkipped():
            return _iteration_skipped(split, one)
        case _:
            return None


def _unused(here: CollectiveSide, there: CollectiveSide) -> Cause | None:
    """Report DDP212 if `here` is in a gradient bucket that `there` left out of the same backward pass."""
    part = _bucket_of(here.entry)
    if here.entry is None or part is None or _bucket_of(there.entry) is not None:
        return None
    before = there.earlier[-1] if there.earlier else None
    last = _bucket_of(before)
    error = there.seen.error.message if there.seen is not None and there.seen.error is not None else ""
    stopped_short = (
        before is not None
        and last is not None
        and (last.model, last.index, _position(before)) == (part.model, (part.index or 0) - 1, _position(here.entry))
    )
    if not (stopped_short or "Expected to have finished reduction" in error):
        return None
    names = ", ".join(part.names[:6]) + (f" and {part.num_parameters - 6} more" if part.num_parameters > 6 else "")
    who = render_ranks(there.ranks)
    why = f"the backward pass of {who} did not reach gradient bucket {part.index} ({names}): the loss of {who} does not"
    return Cause(code="DDP212", ranks=there.ranks, why=f"{why} depend on some of these parameters", at=_at(here))


def _bucket_of(entry: Collective | None) -> DdpPart | None:
    part = entry.ddp if entry is not None else None
    return part if part is not None and part.what == "bucket" else None


def _extra_forward(here: CollectiveSide, there: CollectiveSide, split: Split | None) -> Cause | None:
    """Report DDP211 if `here` runs a forward of a DDP model that `there` does not run."""
    part = here.entry.ddp if here.entry is not None else None
    if here.entry is None or part is None or part.what not in _FORWARD_PARTS:
        return None
    branch = split if isinstance(split, BranchTaken) and split.ranks == here.ranks else None
    position = _position(here.entry)
    # The order of buckets is broadcast in the second forward of a model: the first one's line called no collective.
    is_seen = part.what == "buffers" and bool(here.lines)
    is_new = is_seen and position not in here.lines and position not in there.lines
    same_line = there.entry is not None and _position(there.entry) == position
    if same_line or (branch is None and not is_new):
        return None
    who = render_ranks(here.ranks)
    inside = f", inside {_render_point(branch.file, branch.condition)}" if branch is not None else ""
    what = "broadcasts its buffers" if part.what == "buffers" else "broadcasts its order of buckets"
    why = f"the forward of a DDP model {what} to all ranks, and only {who} runs it, at {render_position(_at(here))}"
    return Cause(code="DDP211", ranks=here.ranks, why=f"{why}{inside}", at=_at(here))


def _position(entry: Collective) -> tuple[str, int]:
    return entry.line.position if entry.line is not None else ("", 0)


def _loop_left(split: LoopLeft, here: CollectiveSide, gone: CollectiveSide) -> Cause | None:
    if split.outer is not None and not split.reasons and _left_outside(here, gone):
        split = split.outer
    who, others, loop = render_ranks(gone.ranks), render_ranks(here.ranks), _render_point(split.file, split.loop)
    reason = next(iter(split.reasons), None)
    if reason is not None:
        return _loop_left_because(reason, split, here, gone)
    if split.has_same_iterations and gone.entry is not None:
        return None  # it has completed the loop, or the others have started the loop again
    if split.has_same_iterations:
        code, why = "DDP208", f"{who} left {loop} before its end: it has the same number of iterations on all ranks"
    elif split.is_endless and split.data_end is None:
        why = f"{who} left {loop}, which does not end by itself, earlier than {others}"
        code, why = "DDP208", f"{why}: a function called in it, or an error, ended it"
    else:
        why = f"{loop} ran fewer iterations on {who} than on {others}, for example because of fewer batches"
        if split.data_end is not None and split.data_end.line != split.loop.line:
            why += f"; its data ends at {_render_point(split.file, split.data_end)}"
        code = "DDP207"
    return Cause(code=code, ranks=gone.ranks, why=why, at=_at(here))


def _loop_left_because(reason: Reason, split: LoopLeft, here: CollectiveSide, gone: CollectiveSide) -> Cause:
    who, others, loop = render_ranks(gone.ranks), render_ranks(here.ranks), _render_point(split.file, split.loop)
    point = _render_point(reason.file, reason.point)
    if reason.kind == "exit":
        code, why = "DDP208", f"{who} left {loop} earlier than {others}: {point} is decided per rank"
        if reason.point.line == split.loop.line:
            why = f"{loop} ended earlier on {who} than on {others}: its condition is evaluated per rank"
    elif reason.kind == "continue":
        code, why = "DDP210", f"{who} ran fewer iterations of {loop}: {point} is decided per rank"
    elif reason.kind == "no_sync":
        why = f"{who} synchronized gradients fewer times in {loop}: whether {point} applies is decided per rank"
        code = "DDP201"
    else:
        why = f"{who} ran fewer iterations of {loop}: {point} continued after an error that {others} did not have"
        code = "DDP210"
    return Cause(code=code, ranks=gone.ranks, why=why, at=_at(here))


def _left_outside(here: CollectiveSide, gone: CollectiveSide) -> bool:
    """Return True if the ranks split at an outer loop, not at the loop over data.

    That is so if `here` has started another pass over the data. If passes are unknown: True unless either side has
    called the program's own collectives.
    """
    passes, others = here.loader_passes, gone.loader_passes
    loader, number = next(reversed(passes.items()), (0, 0))
    if loader in others:
        return number > others[loader]
    if passes and gone.seen is not None and any(note.index <= 1 for note in gone.seen.journal[:1]):
        return True  # all of its passes are known
    return not (here.calls_collectives or gone.calls_collectives)


def _handler_entered(split: HandlerEntered, here: CollectiveSide, gone: CollectiveSide) -> Cause:
    who, others = render_ranks(gone.ranks), render_ranks(here.ranks)
    reason = "an error" if split.handler.text.startswith("except") else "an error or an early exit"
    point = ("the end of " if "with " in split.handler.text else "") + _render_point(split.file, split.handler)
    why = f"{who} entered {point} after {reason} that {others} did not have, and called a collective there too early"
    return Cause(code="DDP210", ranks=gone.ranks, why=why, at=_at(gone))


def _returned_early(split: ReturnedEarly, here: CollectiveSide, gone: CollectiveSide) -> Cause:
    point = _render_point(split.file, split.condition)
    why = f"{render_ranks(gone.ranks)} did not reach {_render_where(here)}: {point} may have returned before"
    return Cause(code="DDP201" if gone.entry is not None else "DDP220", ranks=gone.ranks, why=why, at=_at(here))


def _branch_taken(split: BranchTaken, here: CollectiveSide, there: CollectiveSide) -> Cause:
    behind = "only reached if this is false:" if split.condition.is_else else "inside"
    is_called = here.chain and split.at.line != here.chain[-1].line
    via = f", called at {render_position(split.at)}," if is_called else ""
    rest = "the other ranks do not call it"
    if there.chain:
        rest = f"{render_ranks(there.ranks)} continued to {render_position(_at(there))}"
    why = f"{_render_where(here)}{via} is {behind} {_render_point(split.file, split.condition)}; {rest}"
    code = "DDP201" if there.entry is not None else "DDP220"
    return Cause(code=code, ranks=here.ranks, why=why, at=_at(here), is_branch=not split.has_sibling)


def _iteration_skipped(split: IterationSkipped, one: CollectiveSide) -> Cause | None:
    if split.reason is None:
        return None
    what = "is decided per rank" if split.reason.kind == "continue" else "continues after an error"
    point = _render_point(split.reason.file, split.reason.point)
    why = f"the ranks are at different points of one loop: {point} {what}, so that some skip part of an iteration"
    return Cause(code="DDP210", ranks=split.ranks, why=why, at=_at(one))


def _render_where(side: CollectiveSide) -> str:
    position = render_position(_at(side))
    return f"the {describe_shortly(side.entry)} at {position}" if side.entry is not None else position


def _render_point(file: str, point: DecisionPoint) -> str:
    text = point.text.partition("  #")[0].strip()
    return f"`{text}` ({show_file(file)}:{point.line})"


def _at(side: CollectiveSide) -> CodeLine | None:
    if side.chain:
        return side.chain[-1]
    return side.entry.line if side.entry is not None else None


_NUM_SAME = 32
"""After this many collectives from the same lines on all ranks, an earlier split no longer counts as the origin."""


def show_common(collective: GroupCollective | None) -> tuple[str, ...]:
    """Return a line about the collective before `collective`, if the logs of all ranks of the group hold it."""
    if collective is None:
        return ()
    progress, seq = collective.progress, collective.seq
    entries = list(progress.all_at(seq - 1).values())
    if not entries or len(entries) < len(progress.by_rank):
        return ()
    if len({(entry.op, entry.line and entry.line.position) for entry in entries}) > 1:
        return ()  # different calls that were matched by their number
    return (f"in common until #{seq - 1}: {render_call(entries[0])}",)


def side_in_collective(
    job: JobSnapshot, progress: GroupProgress, ranks: tuple[int, ...], seq: int, *, stacks: bool = True
) -> CollectiveSide:
    """Describe the side of `ranks` in collective `seq` from the first of them that has called it, or from the first."""
    rank = next((each for each in ranks if progress.at(each, seq) is not None), ranks[0])
    entry = progress.at(rank, seq)
    earlier = [each for each in progress.by_rank.get(rank, ()) if each.seq is not None and each.seq < seq]
    lines = frozenset(each.line.position for each in earlier if each.line is not None)
    seen = job.ranks.get(rank)
    chain = chain_of(seen, entry) if seen is not None and stacks else ()
    if not chain and entry is not None:
        chain = chain_of_line(entry.line)
    return CollectiveSide(ranks=ranks, chain=chain, entry=entry, lines=lines, earlier=tuple(earlier), seen=seen)


def find_first_cause(
    job: JobSnapshot, collective: GroupCollective, one: CollectiveSide, other: CollectiveSide, sources: Sources
) -> Cause | None:
    """Return the cause where the two sides first called collectives from different lines, or else in `collective`."""
    origin = _find_origin(job, collective.progress, one.ranks[0], other.ranks[0], collective.seq, sources)
    return (find_cause(*origin, sources) if origin is not None else None) or find_cause(one, other, sources)


def _find_origin(
    job: JobSnapshot, progress: GroupProgress, one: int, other: int, seq: int, sources: Sources
) -> tuple[CollectiveSide, CollectiveSide] | None:
    """Find where two ranks first called collectives from different lines, which may have caused the mismatch at `seq`.

    Returns their sides there; None if the lines do not differ, or the logs do not reach back far enough.
    """
    if one not in progress.by_rank or other not in progress.by_rank:
        return None
    start = max(progress.by_rank[rank][0].seq or 0 for rank in (one, other))
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
    return tuple(side_in_collective(job, progress, (rank,), found, stacks=False) for rank in (one, other))  # type: ignore[return-value]


def _site(entry: Collective) -> tuple[object, ...]:
    part = entry.ddp
    return (*(frame.position for frame in chain_of_line(entry.line)), part and (part.what, part.index))


def _are_siblings(one: Collective, other: Collective, sources: Sources) -> bool:
    """True if the two call paths split at different branches of one condition, as the two sides of a broadcast may."""
    pairs = zip(chain_of_line(one.line), chain_of_line(other.line), strict=False)
    different = ((first, second) for first, second in pairs if first.position != second.position)
    first, second = next(different, (None, None))
    source = sources.find(first) if first is not None else None
    if source is None or first is None or second is None or first.file != second.file:
        return False
    nodes = {id(block.node): block.part for block in source.blocks(first.line)}
    return any(nodes.get(id(block.node), block.part) != block.part for block in source.blocks(second.line))


def side_in_wait(job: JobSnapshot, wait: Wait, held: tuple[int, ...]) -> CollectiveSide:
    """Describe the side of the ranks `held` in `wait`."""
    if wait.collective is not None:
        return side_in_collective(job, wait.collective.progress, held, wait.collective.seq)
    entry = wait.held[held[0]]
    entries = (*(each for each in job.ranks[held[0]].collectives if each.is_p2p), entry)
    lines = frozenset(each.line.position for each in entries if each.line is not None)
    return CollectiveSide(ranks=held, chain=chain_of(job.ranks[held[0]], entry), entry=entry, lines=lines)
