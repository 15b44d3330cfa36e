# SPDX-License-Identifier: Apache-2.0
"""Recognize jobs that were ended as a whole from outside, so that no rank's end is reported as why others waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddpilot.watch.matching.outcomes import Fate, first_deaths
from ddpilot.watch.snapshot.model import JobView, ProcessView, RankView

COMMON_END = (
    "all ranks that are seen from here ended at the same time, from outside: a time limit, `scancel` or another kill "
    "of the whole job"
)
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")


def before_common_end(view: JobView, fates: Mapping[int, Fate]) -> JobView | None:
    """Return the job as it was when all of its ranks were ended at once from outside; None if they were not."""
    ranks = {number: rank for number, rank in view.ranks.items() if rank.process.state != "unknown"}
    if len(ranks) < 2 or not all(_was_ended(rank) for rank in ranks.values()):
        return None
    if len({rank.process.signal_name for rank in ranks.values()}) > 1 or set(first_deaths(view, fates)) != set(ranks):
        return None
    ends_ns = [_ended_ns(rank) for rank in ranks.values()]
    known_ns = [each for each in ends_ns if each is not None]
    if len(known_ns) < len(ends_ns):
        return None
    before = {number: replace(rank, process=_of_unknown_end(rank.process)) for number, rank in ranks.items()}
    return replace(view, ranks={**view.ranks, **before}, now_ns=min(view.now_ns, max(known_ns)))


def _was_ended(rank: RankView) -> bool:
    process = rank.process
    is_over = rank.error is not None or rank.returned or rank.log is None or rank.log.closed_ns is not None
    if process.state != "ended" or is_over:
        return False
    return process.exitcode is None if process.signal_name is None else process.signal_name in _FROM_OUTSIDE


def _ended_ns(rank: RankView) -> int | None:
    ended_ns = rank.process.ended_ns
    return ended_ns if ended_ns is not None or rank.log is None else rank.log.heartbeat_ns


def _of_unknown_end(process: ProcessView) -> ProcessView:
    return ProcessView(pid=process.pid, host=process.host, state="unknown")
