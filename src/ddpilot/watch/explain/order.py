# SPDX-License-Identifier: Apache-2.0
"""Explain different sizes in one collective by ranks that are at different calls of the same sequence."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.explain.text import describe, say_spot
from ddpilot.watch.matching.mismatch import Clash, terms_of
from ddpilot.watch.matching.progress import Progress

ORDER_FIX = (
    "let all ranks make these calls in the same order: sort what they are made for (a set has no order), and give "
    "zeros where a rank has nothing to give"
)
_MIN_TIMES = 2
"""A call counts as the regular successor if it followed the same call this often, with no exception."""


def are_other_buckets(clash: Clash, first: Collective, second: Collective) -> bool:
    """Return True if these are gradient buckets of different parameters.

    DDP compares the sizes of the same parameters when it wraps the model, so different sizes imply different
    parameters.
    """
    parts = [entry.ddp for entry in (first, second)]
    return clash.aspect == "size" and all(part is not None and part.what == "bucket" for part in parts)


def say_other_calls(progress: Progress, seq: int, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return a sentence if both sides call at `seq`, from different lines, what both have called before; else empty."""
    mine, theirs = progress.at(one[0], seq), progress.at(other[0], seq)
    if mine is None or theirs is None or _site(mine) == _site(theirs):
        return ""
    if not (_has_called(progress, one[0], seq, theirs) and _has_called(progress, other[0], seq, mine)):
        return ""
    spots = f"{render_ranks(one)} at {say_spot(mine.line)}, {render_ranks(other)} at {say_spot(theirs.line)}"
    return f"these are different calls, of which all ranks make both: {spots}; some are ahead, or make one more"


def say_left_order(progress: Progress, seq: int, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return a sentence if one side makes the usual call at `seq` and the other a known other call; else empty."""
    for keeps, leaves in ((one, other), (other, one)):
        before, mine, theirs = progress.at(keeps[0], seq - 1), progress.at(keeps[0], seq), progress.at(leaves[0], seq)
        if before is None or mine is None or theirs is None:
            continue
        entries = [each for each in progress.by_rank[keeps[0]] if each.seq is not None and each.seq < seq]
        after = [_key(later) for each, later in pairwise(entries) if _key(each) == _key(before)]
        if len(after) >= _MIN_TIMES and set(after) == {_key(mine)} and _key(theirs) in map(_key, entries):
            return (
                f"so far {describe(mine)} has always come here, as on {render_ranks(keeps)}, and what "
                f"{render_ranks(leaves)} {'gives' if len(leaves) == 1 else 'give'} has come elsewhere: "
                "a call was left out there, or they come in another order"
            )
    return ""


def _has_called(progress: Progress, rank: int, seq: int, like: Collective) -> bool:
    return any(
        _site(entry) == _site(like)
        for entry in progress.by_rank.get(rank, ())
        if entry.seq is not None and entry.seq < seq
    )


def _site(entry: Collective) -> Hashable:
    line = entry.line
    return (line.file, line.line) if line is not None else None


def _key(entry: Collective) -> Hashable:
    return terms_of(entry), _site(entry)
