# SPDX-License-Identifier: Apache-2.0
"""Explain why the arguments of a collective differ between ranks if the control flow does not explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective
from ddpilot.source.parsed_file import Sources
from ddpilot.source.unordered import UNORDERED_FIX, say_unordered
from ddpilot.watch.explain.order import ORDER_FIX, are_other_buckets, say_left_order, say_other_calls
from ddpilot.watch.explain.text import say_spot
from ddpilot.watch.matching.all_to_all import EXCHANGES
from ddpilot.watch.matching.progress import Meet
from ddpilot.watch.snapshot.model import JobView
from ddpilot.watch.snapshot.stacks import Chain

_THREAD_FIX = (
    "let the thread run on all ranks and give it a group of its own (`dist.new_group()` on all ranks), or call from "
    "one thread only"
)
_SHAPE_FIX = "give tensors of one shape on all ranks: `transpose` or `permute` where they are turned"
_EXCHANGE_FIX = "let each rank expect what the others give: exchange the split sizes first, with an even all_to_all"
_OTHER_BUCKETS = (
    "these are gradients of other parameters, as of another model, since DDP compares sizes when it wraps: the ranks "
    "run backward passes in another order, or some run one more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The explanation from the logs or from a loop's source; empty if there is none."""

    why: str = ""
    fix: str = ""
    """Empty if the usual fix for the code applies."""
    are_other_calls: bool = False
    """True if the ranks are in different calls."""


def find_reason(view: JobView, meet: Meet, one: Chain, other: Chain, sources: Sources) -> Reason:
    """Return the first reason that applies to the two sides of `meet`, whose calls are `one` and `other`."""
    sides = [ranks for _, ranks in meet.clash.said]
    thread = _say_thread(view, meet)
    other_calls = _say_other_calls(meet, sides)
    if thread or other_calls:
        fix = _THREAD_FIX if thread else special_fix(meet)
        return Reason(why=thread or other_calls, fix=fix, are_other_calls=bool(other_calls))
    unordered = say_unordered(one, other, sources)
    if unordered:
        return Reason(why=unordered, fix=UNORDERED_FIX)
    left_order = say_left_order(meet.progress, meet.seq, *sides[:2]) if _is_of_tensors(meet) else ""
    return Reason(why=left_order, fix=ORDER_FIX if left_order else special_fix(meet))


def _is_of_tensors(meet: Meet) -> bool:
    return meet.clash.aspect in ("size", "dtype")


def _say_other_calls(meet: Meet, sides: Sequence[tuple[int, ...]]) -> str:
    """Return a sentence if the sides are in different calls; empty otherwise."""
    if not _is_of_tensors(meet):
        return ""
    is_other = are_other_buckets(meet.clash, *(meet.by_rank[ranks[0]] for ranks in sides[:2]))
    return say_other_calls(meet.progress, meet.seq, *sides[:2]) or (_OTHER_BUCKETS if is_other else "")


def special_fix(meet: Meet) -> str:
    """Return the fix for arguments of this kind; empty if the usual fix for the code applies."""
    if meet.clash.aspect == "shape":
        return _SHAPE_FIX
    is_exchange = any(entry.op in EXCHANGES for entry in meet.by_rank.values())
    return _EXCHANGE_FIX if is_exchange and meet.clash.aspect == "size" else ""


def _say_thread(view: JobView, meet: Meet) -> str:
    """Return a sentence if one of the calls comes from a thread other than the main thread; empty otherwise."""
    for rank, entry in sorted(meet.by_rank.items()):
        main = _main_thread(view, rank)
        if entry.ddp is None and main not in (0, entry.thread) and _is_shared(meet.progress.by_rank[rank], main):
            others = [each for each in meet.by_rank if each != rank]
            is_alone = not any(_calls_beside(view, meet, each) for each in others)
            alone = f", as {render_ranks(others)} never did" if is_alone else ""
            spot = say_spot(entry.line)
            return (
                f"{render_ranks([rank])} calls the one at {spot} from another thread{alone}: threads come in any order"
            )
    return ""


def _main_thread(view: JobView, rank: int) -> int:
    """Return the id of the main thread, which is the pid; 0 if it is unknown."""
    seen = view.ranks.get(rank)
    return seen.log.pid if seen is not None and seen.log is not None else 0


def _is_shared(entries: Sequence[Collective], thread: int) -> bool:
    return any(entry.thread == thread for entry in entries)


def _calls_beside(view: JobView, meet: Meet, rank: int) -> bool:
    """True if `rank` has called collectives, other than DDP's, outside its main thread."""
    main = _main_thread(view, rank)
    return any(entry.ddp is None and entry.thread != main for entry in meet.progress.by_rank.get(rank, ()))
