# SPDX-License-Identifier: Apache-2.0
"""Explain ranks without batches in Join, which calls the matching collectives of DDP but not those of the program."""

from __future__ import annotations

from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective
from ddpilot.watch.explain.causes import Cause
from ddpilot.watch.explain.text import describe_shortly, say_spot
from ddpilot.watch.matching.progress import Progress
from ddpilot.watch.snapshot.model import Frame

_ANSWERS = ("Join.__exit__", "__exit__")  # without the class name before Python 3.11
_FIX = (
    "call nothing else between ranks in a loop within Join: sum up on each rank, and all_reduce once behind it; or "
    "give all ranks the same number of batches"
)


def find_joined(progress: Progress, seq: int) -> Cause | None:
    """Return the cause if at `seq` or before a collective of Join met one of the program's own; None otherwise."""
    start = _first_answer(progress, seq)
    for number in range(start, seq + 1):
        here = {rank: entry for rank in sorted(progress.by_rank) if (entry := progress.at(rank, number)) is not None}
        joined = tuple(rank for rank, entry in here.items() if _answers(entry))
        others = tuple(rank for rank, entry in here.items() if _is_own(entry))
        if joined and others:
            return _explain(joined, here[joined[0]], others, here[others[0]])
    return None


def _first_answer(progress: Progress, seq: int) -> int:
    """Return the start of the uninterrupted run of Join's collectives up to `seq`; `seq` + 1 if there is none."""
    start = seq + 1
    while any((entry := progress.at(rank, start - 1)) is not None and _answers(entry) for rank in progress.by_rank):
        start -= 1
    return start


def _answers(entry: Collective) -> bool:
    return entry.line is not None and entry.line.via in _ANSWERS


def _is_own(entry: Collective) -> bool:
    return entry.ddp is None and entry.line is not None and not _answers(entry)


def _explain(joined: tuple[int, ...], answer: Collective, others: tuple[int, ...], own: Collective) -> Cause:
    assert answer.line is not None
    assert own.line is not None
    who = f"{render_ranks(joined)} {'has' if len(joined) == 1 else 'have'} no more batches and"
    answers = f"{'waits' if len(joined) == 1 else 'wait'} in Join ({say_spot(answer.line)})"
    why = (
        f"{who} {answers}, which answers for DDP's collectives alone: the {describe_shortly(own)} of "
        f"{render_ranks(others)} at {say_spot(own.line)} (#{own.seq}) met one of Join's"
    )
    at = Frame(own.line.file, own.line.line, own.line.function, own.line.text)
    return Cause(code="DDP207", ranks=others, why=why, at=at, fix=_FIX)
