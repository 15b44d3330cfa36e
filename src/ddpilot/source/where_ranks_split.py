# SPDX-License-Identifier: Apache-2.0
"""Find where the control flow of two sets of ranks splits, and the reason in the user's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ddpilot.source.control_flow import (
    DecisionPoint,
    continues,
    early_returns,
    find_exits,
    guards,
    handler_of,
    has_same_iterations,
    is_behind_yield,
    is_endless,
    iterates_model,
    no_sync_blocks,
    skipping_handlers,
    suppressing_handlers,
)
from ddpilot.source.parsed_file import Block, Chain, Source, Sources
from ddpilot.user_files import CodeLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A set of ranks with the same control flow."""

    ranks: tuple[int, ...]
    chain: Chain
    """The calls that lead to where they are, outermost first; empty at the end of the program."""
    lines: frozenset[tuple[str, int]] = frozenset()
    """Positions of their earlier collectives in the same group, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the control flow of `ranks` differs from that of the other ranks."""

    ranks: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTaken(Split):
    """Only `ranks` have passed a condition."""

    condition: DecisionPoint
    at: CodeLine
    """The line behind the condition."""
    has_sibling: bool = False
    """True if the other ranks are in a different branch of the same condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerEntered(Split):
    """`ranks` are in an `except`, a `finally` or the end of a `with`, the other ranks in the body before it."""

    handler: DecisionPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedEarly(Split):
    """`ranks` may have returned from a function before the line in it where the other ranks are."""

    condition: DecisionPoint


ReasonKind = Literal["handler", "exit", "handler in a call", "continue", "no_sync"]
"""A handler that continues after an error, an early exit, a `continue`, or a `no_sync` block of some iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason why ranks run a different number of iterations of a loop, or a part of them only."""

    kind: ReasonKind
    file: str
    point: DecisionPoint


_PRECEDENCE = get_args(ReasonKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLeft(Split):
    """`ranks` have left a loop that the other ranks are in."""

    loop: DecisionPoint
    reasons: tuple[Reason, ...]
    """Most likely first; empty if none is known."""
    data_end: DecisionPoint | None
    """Line at which the loop is left when the data is exhausted."""
    has_same_iterations: bool
    """True if the loop has the same number of iterations on all ranks unless it is left early."""
    is_endless: bool
    """True if the loop ends only when it is left."""
    outer: LoopLeft | None = None
    """If there is no reason: a loop around the call that this loop is in, which may be left early."""

    def with_reason(self, reason: Reason | None) -> LoopLeft:
        """Return this split with one more reason, unless it is None."""
        if reason is None:
            return self
        reasons = sorted((*self.reasons, reason), key=lambda each: _PRECEDENCE.index(each.kind))
        return replace(self, reasons=tuple(reasons))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSkipped(Split):
    """All ranks are in one loop, in different iterations or at different lines."""

    reason: Reason | None


def find_split(first: Side, second: Side, sources: Sources) -> Split | None:
    """Return why two sets of ranks are at different lines; None if the source does not show it."""
    if not first.chain or not second.chain:
        return _search_outwards(first, second, sources) if first.chain else _search_outwards(second, first, sources)
    pair = _first_difference(first.chain, second.chain)
    source = sources.find(pair[0]) if pair is not None else None
    if pair is None or source is None:
        return None
    handler = _find_handler(source, (first, pair[0]), (second, pair[1]), sources)
    if handler is not None:
        return handler
    found = _compare(source, (first, pair[0]), (second, pair[1]))
    if isinstance(found, BranchTaken) and found.condition.depends_on_rank:
        return found
    for side, other, frame in ((first, second, pair[0]), (second, first, pair[1])):
        branch = _find_inner_branch(side, other, frame, sources)
        if branch is not None:
            return branch
    behind, ahead = (first, second) if pair[0].line < pair[1].line else (second, first)
    at = min(pair, key=lambda frame: frame.line)
    if isinstance(found, LoopLeft):
        return _look_into_loop(found, behind, ahead, at, sources)
    if isinstance(found, BranchTaken):
        return found
    inner = _look_into_call(behind, ahead, at, sources)
    if found is None or (inner is not None and not isinstance(inner, ReturnedEarly)):
        return inner or found
    handler_reason = None if found.reason is not None else _find_handler_in_calls(behind, at, sources)
    if handler_reason is not None:
        return IterationSkipped(ranks=ahead.ranks, file=handler_reason.file, reason=handler_reason)
    return inner or found


def _find_handler(
    source: Source, one: tuple[Side, CodeLine], other: tuple[Side, CodeLine], sources: Sources
) -> HandlerEntered | None:
    """Check whether one line is in a handler, a `finally`, or the exit of a `with` around the other line."""
    for (side, frame), (_, there) in ((one, other), (other, one)):
        blocks = source.blocks(frame.line)
        point = handler_of(source, blocks, there.line) or _exited_with(source, side, frame, there, sources)
        if point is not None:
            return HandlerEntered(ranks=side.ranks, file=frame.file, handler=point)
    return None


def _exited_with(
    source: Source, side: Side, frame: CodeLine, there: CodeLine, sources: Sources
) -> DecisionPoint | None:
    """Return the `with` at `frame` if its exit runs there while other ranks are at `there` in its body."""
    below = _below(side.chain, frame)
    inner = sources.find(below[0]) if below else None
    is_around = any(block.node.lineno == frame.line and block.part == "body" for block in source.blocks(there.line))
    if inner is None or not is_around or not is_behind_yield(inner, below[0].line, below[0].function):
        return None
    return DecisionPoint(frame.line, source.text(frame.line))


def _find_inner_branch(side: Side, other: Side, at: CodeLine, sources: Sources) -> BranchTaken | None:
    """Find a condition on the rank, in functions called from the line `at`, that only these ranks can have passed."""
    for frame, source in _sources_of(_below(side.chain, at), sources):
        for guard in _deciding(guards(source, source.blocks(frame.line), frame.line), frame.file, other):
            if guard.depends_on_rank and not guard.has_other_branch:
                return BranchTaken(ranks=side.ranks, file=frame.file, condition=guard, at=frame)
    return None


def _sources_of(chain: Sequence[CodeLine], sources: Sources) -> Iterator[tuple[CodeLine, Source]]:
    """Yield the calls of `chain` whose source is known, with it."""
    return ((frame, source) for frame in chain if (source := sources.find(frame)) is not None)


def _below(chain: Chain, at: CodeLine) -> Chain:
    """Return the calls made from the line `at`."""
    lines = [frame.position for frame in chain]
    return chain[lines.index(at.position) + 1 :] if at.position in lines else ()


def _look_into_loop(found: LoopLeft, behind: Side, ahead: Side, at: CodeLine, sources: Sources) -> LoopLeft:
    """Refine `found` by the functions called in the loop; return their loop if this one is the same on all ranks."""
    if any(reason.kind != "no_sync" for reason in found.reasons):
        return found
    if found.has_same_iterations and not found.reasons:
        inner = _look_into_call(behind, ahead, at, sources)
        if isinstance(inner, LoopLeft):
            return inner
    return found.with_reason(_find_handler_in_calls(behind, at, sources))


def _find_handler_in_calls(side: Side, at: CodeLine, sources: Sources) -> Reason | None:
    """Find a handler that continues after an error, in functions called from `at` and around where `side` is."""
    found = (_handler_around(source, frame) for frame, source in _sources_of(_below(side.chain, at)[::-1], sources))
    return next((reason for reason in found if reason is not None), None)


def _handler_around(source: Source, frame: CodeLine) -> Reason | None:
    points = suppressing_handlers(source, source.blocks(frame.line))
    return Reason(kind="handler in a call", file=frame.file, point=points[0]) if points else None


def _look_into_call(behind: Side, ahead: Side, at: CodeLine, sources: Sources) -> Split | None:
    """Search the call at `at`, which the ranks `behind` are in and the ranks `ahead` have returned from."""
    below = _below(behind.chain, at)
    return _search_outwards(replace(behind, chain=below), ahead, sources) if below else None


def _search_outwards(here: Side, gone: Side, sources: Sources) -> Split | None:
    """Return why the ranks `gone` reached the end while others are `here`, searching from the innermost call."""
    best: BranchTaken | LoopLeft | None = None
    outer: LoopLeft | None = None
    handler: Reason | None = None
    for frame, source in _sources_of(here.chain[::-1], sources):
        found = _find_split_in(source, frame, here, gone)
        if isinstance(found, BranchTaken) and found.condition.depends_on_rank:
            return found
        if found is not None and (best is None or (isinstance(best, BranchTaken) and isinstance(found, LoopLeft))):
            best = found.with_reason(handler) if isinstance(found, LoopLeft) else found
        elif outer is None and isinstance(found, LoopLeft) and any(each.kind == "exit" for each in found.reasons):
            outer = found
        handler = handler or _handler_around(source, frame)
    if isinstance(best, LoopLeft):
        return replace(best, outer=outer)
    return best or _find_early_return(here, gone, sources)


def _find_early_return(here: Side, gone: Side, sources: Sources) -> ReturnedEarly | None:
    for frame, source in _sources_of(here.chain[::-1], sources):
        points = early_returns(source, frame.line)
        if points:
            return ReturnedEarly(ranks=gone.ranks, file=frame.file, condition=points[0])
    return None


def _first_difference(one: Chain, other: Chain) -> tuple[CodeLine, CodeLine] | None:
    """Return the first pair of frames, from the outermost, at which two chains differ within one function."""
    at = 0
    for frame in one:
        for number in range(at, len(other)):
            if (other[number].file, other[number].function) == (frame.file, frame.function):
                if other[number].line != frame.line:
                    return frame, other[number]
                at = number + 1
                break
    return None


def _find_split_in(source: Source, frame: CodeLine, here: Side, gone: Side) -> BranchTaken | LoopLeft | None:
    """Return why the ranks `gone` have left the function of `frame` while the ranks `here` are in it."""
    blocks = source.blocks(frame.line)
    guard = _choose(_deciding(guards(source, blocks, frame.line), frame.file, gone))
    loop = _outermost_loop(blocks)
    if loop is not None and not (guard is not None and guard.depends_on_rank):
        return _describe_left_loop(source, loop, blocks, frame, gone)
    return BranchTaken(ranks=here.ranks, file=frame.file, condition=guard, at=frame) if guard is not None else None


def _compare(
    source: Source, one: tuple[Side, CodeLine], other: tuple[Side, CodeLine]
) -> BranchTaken | LoopLeft | IterationSkipped | None:
    sides = (one, other)
    around = [source.blocks(frame.line) for _, frame in sides]
    num_common = _count_common(*around)
    own = [blocks[num_common:] for blocks in around]
    conditions = [_choose(_own_guards(source, sides[i][1], own[i], *sides[1 - i])) for i in (0, 1)]
    lines = {condition.line if condition is not None else None for condition in conditions}
    has_sibling = len(lines) == 1 and None not in lines

    def branch(i: int, guard: DecisionPoint) -> BranchTaken:
        side, frame = sides[i]
        return BranchTaken(ranks=side.ranks, file=frame.file, condition=guard, at=frame, has_sibling=has_sibling)

    found = [(i, guard) for i, guard in enumerate(conditions) if guard is not None]
    for i, guard in sorted(found, key=lambda each: each[1].is_else):
        if guard.depends_on_rank:
            return branch(i, guard)
    for i, (_, frame) in enumerate(sides):
        loop = _outermost_loop(own[i])
        if loop is not None and sides[1 - i][1].line > (loop.node.end_lineno or 0):
            return _describe_left_loop(source, loop, own[i], frame, sides[1 - i][0])
    if found:
        return branch(*min(found, key=lambda each: len(sides[each[0]][0].ranks)))
    loops = [block for block in around[0][:num_common] if block.is_loop]
    return _compare_iterations(source, loops[-1], [frame for _, frame in sides]) if loops else None


def _compare_iterations(source: Source, loop: Block, frames: Sequence[CodeLine]) -> IterationSkipped:
    file, line = frames[0].file, max(frame.line for frame in frames)
    handlers = [*suppressing_handlers(source, source.blocks(line)), *skipping_handlers(source, loop.node, line)]
    reasons = _reasons(file, {"handler": handlers, "continue": continues(source, loop.node, line)})
    return IterationSkipped(ranks=(), file=file, reason=next(iter(reasons), None))


def _reasons(file: str, points: Mapping[ReasonKind, Sequence[DecisionPoint]]) -> tuple[Reason, ...]:
    return tuple(Reason(kind=kind, file=file, point=each[0]) for kind, each in points.items() if each)


def _own_guards(
    source: Source, frame: CodeLine, own: Sequence[Block], other: Side, there: CodeLine
) -> list[DecisionPoint]:
    """Return conditions of `frame` that do not apply to `there`; a return before both lines is common to both."""
    other_lines = {point.line for point in guards(source, (), there.line)}
    found = _deciding(guards(source, own, frame.line), frame.file, other)
    return [point for point in found if point.line not in other_lines]


def _deciding(points: Sequence[DecisionPoint], file: str, other: Side) -> list[DecisionPoint]:
    """Drop conditions that always or never hold on a rank and that the `other` ranks have passed before."""
    return [point for point in points if not any((file, line) in other.lines for line in point.fixed_lines)]


def _choose(points: Sequence[DecisionPoint]) -> DecisionPoint | None:
    """Return the innermost condition on the rank; without one, the innermost condition."""
    return next((point for point in reversed(points) if point.depends_on_rank), points[-1] if points else None)


def _outermost_loop(blocks: Sequence[Block]) -> Block | None:
    return next(iter(_loops(blocks)), None)


def _loops(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.is_loop and not iterates_model(block.node)]


def _count_common(one: Sequence[Block], other: Sequence[Block]) -> int:
    same = [first.same_as(second) for first, second in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _describe_left_loop(source: Source, loop: Block, blocks: Sequence[Block], frame: CodeLine, gone: Side) -> LoopLeft:
    loops = [block.node for block in _loops(blocks)]
    inside = list(blocks)[list(blocks).index(loop) :]
    early, at_data_end = find_exits(source, loops, has_ended=not gone.chain)
    never_ends = is_endless(source, loop.node)
    left = loop.node if never_ends else loops[-1]
    is_same = all(has_same_iterations(source, each) for each in loops)
    skipped: list[DecisionPoint] = []
    if never_ends:  # a handler that continues with the next iteration does not end an endless loop
        handlers = suppressing_handlers(source, inside if early else blocks, leaving=loop.node)
    else:
        handlers = suppressing_handlers(source, inside)
        handlers += [point for each in loops for point in skipping_handlers(source, each, frame.line)]
        skipped = [point for each in loops for point in continues(source, each, frame.line)]
    points: Mapping[ReasonKind, Sequence[DecisionPoint]] = {
        "handler": handlers,
        "exit": sorted(early, key=lambda point: not point.depends_on_rank),
        "continue": skipped,
        "no_sync": no_sync_blocks(source, inside) if is_same else (),
    }
    return LoopLeft(
        ranks=gone.ranks,
        file=frame.file,
        loop=DecisionPoint(left.lineno, source.text(left.lineno)),
        reasons=_reasons(frame.file, points),
        data_end=next(iter(at_data_end), None),
        has_same_iterations=is_same,
        is_endless=never_ends,
    )
