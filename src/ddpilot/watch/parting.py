# SPDX-License-Identifier: Apache-2.0
"""Where the ways of two sets of ranks part, and what the user's source says of the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpilot.watch.control import (
    Spot,
    early_exits,
    exits_in_calls,
    guards,
    has_same_rounds,
    own_ends,
    skips,
    swallowers,
    unsynced,
)
from ddpilot.watch.source import Block, Source, Sources
from ddpilot.watch.stacks import Chain
from ddpilot.watch.view import Frame

_MAX_CALLERS = 8


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that went the same way."""

    ranks: tuple[int, ...]
    chain: Chain
    """Empty where they have come to the end of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What decided that `ranks` went another way than the others; each of the reasons only where it applies."""

    ranks: tuple[int, ...]
    file: str
    """Where all the spots are."""
    guard: Spot | None = None
    """A condition that let only `ranks` pass."""
    at: Frame | None = None
    """The line behind the guard; or the line of the loop's body where the others are."""
    loop: Spot | None = None
    """A loop that `ranks` have left while the others are in it."""
    swallower: Spot | None = None
    """A handler in that loop, around what the others are in, that goes on after an error."""
    skip: Spot | None = None
    """Where a round of that loop may be cut short."""
    exit: Spot | None = None
    """Where that loop may be left early; the loop itself, where its condition may end it."""
    unsynced: Spot | None = None
    """In that loop, where DDP exchanges nothing in some rounds."""
    same_rounds: bool = False
    """That loop has as many rounds on all ranks, if it is not left."""
    are_siblings: bool = False
    """The others are in the other branch of the guard."""
    same_loop: bool = False
    """All are still in the loop: in different rounds, or at different lines of it."""


def find_parting(first: Side, second: Side, sources: Sources) -> Parting | None:
    """Why two sets of ranks are at different lines; None where the source does not say."""
    if not first.chain or not second.chain:
        return find_end_parting(first, second, sources) if first.chain else find_end_parting(second, first, sources)
    first, second = (replace(side, chain=_complete(side.chain, sources)) for side in (first, second))
    pair = _part(first.chain, second.chain)
    source = sources.find(pair[0]) if pair is not None else None
    if pair is None or source is None:
        return None
    found = _compare(source, (first, pair[0]), (second, pair[1]))
    if found is not None and found.guard is not None and found.guard.depends_on_rank:
        return found
    for side, frame in zip((first, second), pair, strict=True):
        deep = _find_deep_guard(side, frame, sources)
        if deep is not None:
            return deep
    if found is not None and (found.guard or found.loop):
        return found
    behind, ahead = (first, second) if pair[0].line < pair[1].line else (second, first)
    return _look_deeper(behind, ahead, min(pair, key=lambda frame: frame.line), sources) or found


def _find_deep_guard(side: Side, at: Frame, sources: Sources) -> Parting | None:
    """In what is called from the line `at`, a condition on the rank that only these ranks can have passed."""
    for frame in _below(side.chain, at):
        source = sources.find(frame)
        found = guards(source, source.blocks(frame.line), frame.line) if source is not None else []
        for guard in found:
            if guard.depends_on_rank and not guard.has_other_branch:
                return _behind(side, frame, guard, siblings=False)
    return None


def _below(chain: Chain, at: Frame) -> Chain:
    """The calls that are made from the line `at`."""
    lines = [(frame.file, frame.line) for frame in chain]
    return chain[lines.index((at.file, at.line)) + 1 :] if (at.file, at.line) in lines else ()


def _look_deeper(behind: Side, ahead: Side, at: Frame, sources: Sources) -> Parting | None:
    """The others are in a call that the ranks `ahead` have come back from."""
    deeper = _below(behind.chain, at)
    return find_end_parting(Side(behind.ranks, deeper), ahead, sources) if deeper else None


def find_end_parting(here: Side, gone: Side, sources: Sources) -> Parting | None:
    """Why the ranks `gone` have come to the end while others are `here`: from the innermost call outwards."""
    best: Parting | None = None
    for frame in reversed(_complete(here.chain, sources)):
        source = sources.find(frame)
        found = _parting_from_end(source, frame, here, gone) if source is not None else None
        if found is not None and found.guard is not None and found.guard.depends_on_rank:
            return found
        if found is not None and (best is None or (best.loop is None and found.loop is not None)):
            best = found
    return best


def _part(one: Chain, other: Chain) -> tuple[Frame, Frame] | None:
    """The first lines, from outside, at which two chains differ within one function."""
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


def _complete(chain: Chain, sources: Sources) -> Chain:
    """`chain`, and where it is a single line also the callers that can only be, as the source has it."""
    if len(chain) != 1:
        return chain
    found = list(chain)
    source = sources.find(chain[0])
    while source is not None and found[0].function not in ("", "<module>") and len(found) < _MAX_CALLERS:
        wrappers = source.wrappers_of(found[0].function.rpartition(".")[2])
        callers = {caller.line: caller for caller in source.calls_of(found[0].function.rpartition(".")[2])}
        if len(callers) != 1:
            break
        outer = [*callers.values(), *wrappers]
        found[:0] = [Frame(chain[0].file, each.line, each.function, each.text) for each in outer]
    return tuple(found)


def _parting_from_end(source: Source, frame: Frame, here: Side, gone: Side) -> Parting | None:
    blocks = source.blocks(frame.line)
    guard = _choose(guards(source, blocks, frame.line))
    if guard is not None and guard.depends_on_rank:
        return Parting(ranks=here.ranks, file=frame.file, guard=guard, at=frame)
    loop = _outermost_loop(blocks)
    if loop is not None:
        return _left_loop(source, loop, blocks, frame, gone.ranks)
    return Parting(ranks=here.ranks, file=frame.file, guard=guard, at=frame) if guard is not None else None


def _compare(source: Source, one: tuple[Side, Frame], other: tuple[Side, Frame]) -> Parting | None:
    sides = (one, other)
    around = [source.blocks(frame.line) for _, frame in sides]
    common = _count_common(*around)
    own = [blocks[common:] for blocks in around]
    conditions = [_choose(_own_guards(source, frame, own[i], sides[1 - i][1])) for i, (_, frame) in enumerate(sides)]
    siblings = conditions[0] is not None and conditions[1] is not None and conditions[0].line == conditions[1].line
    by_branch = sorted(zip(sides, conditions, strict=True), key=lambda each: each[1] is not None and each[1].is_else)
    for side, guard in by_branch:
        if guard is not None and guard.depends_on_rank:
            return _behind(*side, guard, siblings)
    for i, (_, frame) in enumerate(sides):
        loop = _outermost_loop(own[i])
        if loop is not None and sides[1 - i][1].line > (loop.node.end_lineno or 0):
            return _left_loop(source, loop, own[i], frame, sides[1 - i][0].ranks)
    in_loop = any(block.is_loop for block in around[0][:common])
    smaller = sorted((0, 1), key=lambda i: len(sides[i][0].ranks))
    for i in smaller:
        guard = conditions[i]
        if guard is not None:
            return _behind(*sides[i], guard, siblings)
    if not in_loop:
        return None
    return _same_loop(source, one[1].file, around[0][:common], max(frame.line for _, frame in sides))


def _behind(side: Side, frame: Frame, guard: Spot, siblings: bool) -> Parting:
    return Parting(ranks=side.ranks, file=frame.file, guard=guard, at=frame, are_siblings=siblings)


def _same_loop(source: Source, file: str, common: Sequence[Block], line: int) -> Parting:
    loop = [block for block in common if block.is_loop][-1]
    return Parting(
        ranks=(),
        file=file,
        same_loop=True,
        swallower=next(iter(swallowers(source, source.blocks(line))), None),
        skip=next(iter(skips(source, loop.node, line)), None),
    )


def _own_guards(source: Source, frame: Frame, own: Sequence[Block], other: Frame) -> list[Spot]:
    """Conditions of `frame` that are none of the `other` line's; leaving before both lines parts neither."""
    other_lines = {spot.line for spot in guards(source, (), other.line)}
    return [spot for spot in guards(source, own, frame.line) if spot.line not in other_lines]


def _choose(spots: Sequence[Spot]) -> Spot | None:
    """The innermost that asks for the rank; else the innermost."""
    return next((spot for spot in reversed(spots) if spot.depends_on_rank), spots[-1] if spots else None)


def _outermost_loop(blocks: Sequence[Block]) -> Block | None:
    return next((block for block in blocks if block.is_loop), None)


def _count_common(one: Sequence[Block], other: Sequence[Block]) -> int:
    same = [first.same_as(second) for first, second in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _left_loop(source: Source, loop: Block, blocks: Sequence[Block], frame: Frame, gone: Sequence[int]) -> Parting:
    loops = [block for block in blocks if block.is_loop]
    inside = list(blocks)[list(blocks).index(loop) :]
    exits = [spot for each in loops for spot in (*early_exits(source, each.node), *own_ends(source, each.node))]
    same_rounds = all(has_same_rounds(source, each.node) for each in loops)
    if same_rounds and not exits:
        exits = [spot for each in loops for spot in exits_in_calls(source, each.node)]
    rounds = [spot for each in loops for spot in skips(source, each.node, frame.line)]
    return Parting(
        ranks=tuple(gone),
        file=frame.file,
        loop=Spot(loops[-1].node.lineno, source.text(loops[-1].node.lineno)),
        at=frame,
        swallower=next(iter(swallowers(source, inside)), None),
        skip=rounds[0] if rounds else None,
        exit=next((spot for spot in exits if spot.depends_on_rank), exits[0] if exits else None),
        unsynced=next(iter(unsynced(source, inside)), None) if same_rounds else None,
        same_rounds=same_rounds,
    )
