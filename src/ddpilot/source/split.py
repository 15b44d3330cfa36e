# SPDX-License-Identifier: Apache-2.0
"""Find where the control flow of two sets of ranks splits, and the reason in the user's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpilot.source.control_flow import (
    DecisionPoint,
    early_returns,
    find_exits,
    goes_over_model,
    guards,
    handler_of,
    has_same_iterations,
    is_behind_yield,
    is_endless,
    skipping_handlers,
    skips,
    swallowers,
    unsynced,
)
from ddpilot.source.parsed_file import Block, Chain, Source, Sources
from ddpilot.user_files import CodeLine


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks with the same control flow."""

    ranks: tuple[int, ...]
    chain: Chain
    """Empty if the ranks have reached the end of the program."""
    lines: frozenset[tuple[str, int]] = frozenset()
    """(file, line) of their earlier collectives in the same group, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where and why `ranks` took a different path than the others. Only fields of reasons that apply are set."""

    ranks: tuple[int, ...]
    file: str
    """The file that contains all spots."""
    guard: DecisionPoint | None = None
    """A condition that only `ranks` have passed."""
    at: CodeLine | None = None
    """The line behind the guard, or the line in the loop's body where the others are."""
    loop: DecisionPoint | None = None
    """A loop that `ranks` have left while the others are in it."""
    swallower: DecisionPoint | None = None
    """A handler in that loop that continues after an error, around the line where the others are."""
    skip: DecisionPoint | None = None
    """Where an iteration of that loop may be cut short."""
    exit: DecisionPoint | None = None
    """Where that loop may be left early; the loop itself if its condition may end it."""
    data_end: DecisionPoint | None = None
    """Where that loop is left when the data is exhausted."""
    handler: DecisionPoint | None = None
    """An `except`, `finally` or end of a `with` that `ranks` are in while the others are in the body before it."""
    left: DecisionPoint | None = None
    """Where `ranks` may have left a function that the others are in."""
    unsynced: DecisionPoint | None = None
    """In that loop, a `no_sync` block that applies to some iterations only."""
    same_rounds: bool = False
    """True if that loop has the same number of iterations on all ranks unless it is left early."""
    is_endless: bool = False
    """True if that loop ends only when it is left."""
    are_siblings: bool = False
    """True if the others are in the other branch of the guard."""
    same_loop: bool = False
    """True if all ranks are still in the loop, in different iterations or at different lines."""
    outer: Split | None = None
    """If nothing explains the end of that loop: a loop around the call that it is in, which may be left early."""
    swallowed: Split | None = None
    """A handler that continues after an error, in a function called from that loop, around where the others are."""


def find_split(first: Side, second: Side, sources: Sources) -> Split | None:
    """Return why two sets of ranks are at different lines; None if the source does not show it."""
    if not first.chain or not second.chain:
        return find_split_at_end(first, second, sources) if first.chain else find_split_at_end(second, first, sources)
    pair = _part(first.chain, second.chain)
    source = sources.find(pair[0]) if pair is not None else None
    if pair is None or source is None:
        return None
    handled = _find_handler(source, (first, pair[0]), (second, pair[1]), sources)
    if handled is not None:
        return handled
    found = _compare(source, (first, pair[0]), (second, pair[1]))
    if found is not None and found.guard is not None and found.guard.depends_on_rank:
        return found
    for side, other, frame in ((first, second, pair[0]), (second, first, pair[1])):
        deep = _find_deep_guard(side, other, frame, sources)
        if deep is not None:
            return deep
    behind, ahead = (first, second) if pair[0].line < pair[1].line else (second, first)
    at = min(pair, key=lambda frame: frame.line)
    if found is not None and found.loop is not None:
        return _look_into_loop(found, behind, ahead, at, sources)
    if found is not None and found.guard is not None:
        return found
    deeper = _look_deeper(behind, ahead, at, sources)
    if found is None or not found.same_loop or (deeper is not None and deeper.left is None):
        return deeper or found
    has_reason = found.swallower is not None or found.skip is not None
    return (None if has_reason else _find_swallowed(behind, ahead, at, sources)) or deeper or found


def _find_handler(
    source: Source, one: tuple[Side, CodeLine], other: tuple[Side, CodeLine], sources: Sources
) -> Split | None:
    """Check whether one line is in a handler, a `finally`, or the exit of a `with` around the other line."""
    for (side, frame), (_, there) in ((one, other), (other, one)):
        spot = handler_of(source, source.blocks(frame.line), there.line) or _with_left(
            source, side, frame, there, sources
        )
        if spot is not None:
            return Split(ranks=side.ranks, file=frame.file, handler=spot, at=frame)
    return None


def _with_left(source: Source, side: Side, frame: CodeLine, there: CodeLine, sources: Sources) -> DecisionPoint | None:
    """Return the `with` at `frame` if its exit runs there while other ranks are at `there` in its body."""
    below = _below(side.chain, frame)
    deeper = sources.find(below[0]) if below else None
    is_around = any(block.node.lineno == frame.line and block.part == "body" for block in source.blocks(there.line))
    if deeper is None or not is_around or not is_behind_yield(deeper, below[0].line, below[0].function):
        return None
    return DecisionPoint(frame.line, source.text(frame.line))


def _find_deep_guard(side: Side, other: Side, at: CodeLine, sources: Sources) -> Split | None:
    """Find a condition on the rank, in functions called from the line `at`, that only these ranks can have passed."""
    for frame in _below(side.chain, at):
        source = sources.find(frame)
        callee = _callee(side.chain, frame)
        found = guards(source, source.blocks(frame.line), frame.line, callee) if source is not None else []
        for guard in _deciding(found, frame.file, other):
            if guard.depends_on_rank and not guard.has_other_branch:
                return _behind(side, frame, guard, siblings=False)
    return None


def _below(chain: Chain, at: CodeLine) -> Chain:
    """Return the calls made from the line `at`."""
    lines = [frame.position for frame in chain]
    return chain[lines.index(at.position) + 1 :] if at.position in lines else ()


def _look_into_loop(found: Split, behind: Side, ahead: Side, at: CodeLine, sources: Sources) -> Split:
    """Refine `found` by the functions called in the loop; return their loop if this one is the same on all ranks."""
    if found.swallower is not None or found.exit is not None or found.skip is not None:
        return found
    if found.same_rounds and found.unsynced is None:
        deeper = _look_deeper(behind, ahead, at, sources)
        if deeper is not None and deeper.loop is not None:
            return deeper
    return replace(found, swallowed=_find_swallowed(behind, ahead, at, sources))


def _find_swallowed(behind: Side, ahead: Side, at: CodeLine, sources: Sources) -> Split | None:
    """Find a handler that continues after an error, in functions called from `at` and around where the others are."""
    for frame in reversed(_below(behind.chain, at)):
        source = sources.find(frame)
        found = _swallowed_at(source, frame, ahead) if source is not None else None
        if found is not None:
            return found
    return None


def _swallowed_at(source: Source, frame: CodeLine, ahead: Side) -> Split | None:
    spots = swallowers(source, source.blocks(frame.line))
    return Split(ranks=ahead.ranks, file=frame.file, same_loop=True, swallower=spots[0], at=frame) if spots else None


def _callee(chain: Chain, at: CodeLine) -> str:
    """Return the name of the function called from the line `at`; empty if it is not the user's."""
    below = _below(chain, at)
    return below[0].function.rpartition(".")[2] if below else ""


def _look_deeper(behind: Side, ahead: Side, at: CodeLine, sources: Sources) -> Split | None:
    """Search the call that the ranks `behind` are in and the ranks `ahead` have returned from."""
    deeper = _below(behind.chain, at)
    return _search_outwards(replace(behind, chain=deeper), ahead, sources) if deeper else None


def find_split_at_end(here: Side, gone: Side, sources: Sources) -> Split | None:
    """Return why the ranks `gone` reached the end while others are `here`, searching from the innermost call."""
    return _search_outwards(here, gone, sources)


def _search_outwards(here: Side, gone: Side, sources: Sources) -> Split | None:
    best: Split | None = None
    outer: Split | None = None
    swallowed: Split | None = None
    for frame in reversed(here.chain):
        source = sources.find(frame)
        found = _parting_from_end(source, frame, here, gone) if source is not None else None
        if found is not None and found.guard is not None and found.guard.depends_on_rank:
            return found
        if found is not None and (best is None or (best.loop is None and found.loop is not None)):
            best = replace(found, swallowed=swallowed)
        elif found is not None and found.exit is not None and outer is None:
            outer = found
        if source is not None and swallowed is None:
            swallowed = _swallowed_at(source, frame, gone)
    return replace(best, outer=outer) if best is not None else _find_left(here, gone, sources)


def _find_left(here: Side, gone: Side, sources: Sources) -> Split | None:
    """As a last resort, find a function that the ranks `gone` may have left before the line of the others."""
    for frame in reversed(here.chain):
        source = sources.find(frame)
        spots = early_returns(source, frame.line) if source is not None else []
        if spots:
            return Split(ranks=gone.ranks, file=frame.file, left=spots[0], at=frame)
    return None


def _part(one: Chain, other: Chain) -> tuple[CodeLine, CodeLine] | None:
    """Return the first pair of frames, from the outermost, at which two chains differ within one function."""
    if not one or not other:
        return None
    at = 0
    for frame in one:
        for number in range(at, len(other)):
            if (other[number].file, other[number].function) == (frame.file, frame.function):
                if other[number].line != frame.line:
                    return frame, other[number]
                at = number + 1
                break
    return None


def _parting_from_end(source: Source, frame: CodeLine, here: Side, gone: Side) -> Split | None:
    blocks = source.blocks(frame.line)
    found = guards(source, blocks, frame.line, _callee(here.chain, frame))
    guard = _choose(_deciding(found, frame.file, gone))
    if guard is not None and guard.depends_on_rank:
        return Split(ranks=here.ranks, file=frame.file, guard=guard, at=frame)
    loop = _outermost_loop(blocks)
    if loop is not None:
        return _left_loop(source, loop, blocks, frame, gone)
    return Split(ranks=here.ranks, file=frame.file, guard=guard, at=frame) if guard is not None else None


def _compare(source: Source, one: tuple[Side, CodeLine], other: tuple[Side, CodeLine]) -> Split | None:
    sides = (one, other)
    around = [source.blocks(frame.line) for _, frame in sides]
    common = _count_common(*around)
    own = [blocks[common:] for blocks in around]
    conditions = [_choose(_own_guards(source, *sides[i], own[i], *sides[1 - i])) for i in (0, 1)]
    siblings = conditions[0] is not None and conditions[1] is not None and conditions[0].line == conditions[1].line
    by_branch = sorted(zip(sides, conditions, strict=True), key=lambda each: each[1] is not None and each[1].is_else)
    for side, guard in by_branch:
        if guard is not None and guard.depends_on_rank:
            return _behind(*side, guard, siblings)
    for i, (_, frame) in enumerate(sides):
        loop = _outermost_loop(own[i])
        if loop is not None and sides[1 - i][1].line > (loop.node.end_lineno or 0):
            return _left_loop(source, loop, own[i], frame, sides[1 - i][0])
    in_loop = any(block.is_loop for block in around[0][:common])
    smaller = sorted((0, 1), key=lambda i: len(sides[i][0].ranks))
    for i in smaller:
        guard = conditions[i]
        if guard is not None:
            return _behind(*sides[i], guard, siblings)
    if not in_loop:
        return None
    return _same_loop(source, one[1].file, around[0][:common], max(frame.line for _, frame in sides))


def _behind(side: Side, frame: CodeLine, guard: DecisionPoint, siblings: bool) -> Split:
    return Split(ranks=side.ranks, file=frame.file, guard=guard, at=frame, are_siblings=siblings)


def _same_loop(source: Source, file: str, common: Sequence[Block], line: int) -> Split:
    loop = [block for block in common if block.is_loop][-1]
    handlers = [*swallowers(source, source.blocks(line)), *skipping_handlers(source, loop.node, line)]
    return Split(
        ranks=(),
        file=file,
        same_loop=True,
        swallower=next(iter(handlers), None),
        skip=next(iter(skips(source, loop.node, line)), None),
    )


def _own_guards(
    source: Source, side: Side, frame: CodeLine, own: Sequence[Block], other: Side, there: CodeLine
) -> list[DecisionPoint]:
    """Return conditions of `frame` that do not apply to `there`; a return before both lines is common to both."""
    other_lines = {spot.line for spot in guards(source, (), there.line)}
    found = guards(source, own, frame.line, _callee(side.chain, frame))
    return [spot for spot in _deciding(found, frame.file, other) if spot.line not in other_lines]


def _deciding(spots: Sequence[DecisionPoint], file: str, other: Side) -> list[DecisionPoint]:
    """Drop conditions that always or never hold on a rank and that the `other` ranks have passed before."""
    return [spot for spot in spots if not any((file, line) in other.lines for line in spot.fixed_lines)]


def _choose(spots: Sequence[DecisionPoint]) -> DecisionPoint | None:
    """Return the innermost condition on the rank; without one, the innermost condition."""
    return next((spot for spot in reversed(spots) if spot.depends_on_rank), spots[-1] if spots else None)


def _outermost_loop(blocks: Sequence[Block]) -> Block | None:
    return next((block for block in blocks if _counts_rounds(block)), None)


def _counts_rounds(block: Block) -> bool:
    return block.is_loop and not goes_over_model(block.node)


def _count_common(one: Sequence[Block], other: Sequence[Block]) -> int:
    same = [first.same_as(second) for first, second in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _left_loop(source: Source, loop: Block, blocks: Sequence[Block], frame: CodeLine, gone: Side) -> Split:
    loops = [block for block in blocks if _counts_rounds(block)]
    inside = list(blocks)[list(blocks).index(loop) :]
    exits = find_exits(source, [each.node for each in loops], has_ended=not gone.chain)
    never_ends = is_endless(source, loop.node)
    left = loop.node if never_ends else loops[-1].node
    same_rounds = all(has_same_iterations(source, each.node) for each in loops)
    if never_ends:  # a handler that continues with the next iteration does not end an endless loop
        handlers = swallowers(source, inside if exits.decided else blocks, leaving=loop.node)
        rounds = []
    else:
        handlers = [
            *swallowers(source, inside),
            *(spot for each in loops for spot in skipping_handlers(source, each.node, frame.line)),
        ]
        rounds = [spot for each in loops for spot in skips(source, each.node, frame.line)]
    return Split(
        ranks=gone.ranks,
        file=frame.file,
        loop=DecisionPoint(left.lineno, source.text(left.lineno)),
        at=frame,
        swallower=handlers[0] if handlers else None,
        skip=rounds[0] if rounds else None,
        exit=next((spot for spot in exits.decided if spot.depends_on_rank), next(iter(exits.decided), None)),
        data_end=next(iter(exits.of_data), None),
        unsynced=next(iter(unsynced(source, inside)), None) if same_rounds else None,
        same_rounds=same_rounds,
        is_endless=never_ends,
    )
