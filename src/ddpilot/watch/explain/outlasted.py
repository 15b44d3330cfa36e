# SPDX-License-Identifier: Apache-2.0
"""Explain waits that failed on the waiting ranks while the ranks that they waited for continued to run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.watch.explain.causes import FIXES
from ddpilot.watch.explain.text import (
    describe,
    describe_shortly,
    lay_out,
    merge_rows,
    place_of,
    say_call,
    say_place,
    who_does,
)
from ddpilot.watch.explain.waits import Open, explain_open
from ddpilot.watch.matching.outcomes import Fate
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobView, ProcessView, RankView

_TIME_IS_UP = re.compile(r"timed ?out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_LONGER = "what is meant to take long needs a longer `timeout=` of init_process_group"
_ENDING_NS = 1_500_000_000
"""A rank that closes its connections because it exits is gone within this time."""
_BY_LAUNCHER = ("SIGTERM", "SIGINT")


def explain_outlasted(view: JobView, earlier: JobView | None, wait: Wait, fates: Mapping[int, Fate]) -> Finding | None:
    """Return the finding for ranks that had not arrived at the timeout, or closed their connections; None if neither.

    The launcher terminates the other ranks after a failure; a rank that it terminated counts as having continued.
    """
    ended_ns = [view.ranks[rank].process.ended_ns for rank in wait.held if fates[rank].is_gone]
    first_ns = min((each for each in ended_ns if each is not None), default=None)
    late = tuple(rank for rank in wait.missing if _ran_on(view.ranks.get(rank), fates[rank], first_ns))
    if wait.meeting is None or not late or len(late) != len(wait.missing) or not all(_is_over(wait, fates)):
        return None
    errors = [view.ranks[rank].error for rank in wait.held]
    if any(error is not None and _TIME_IS_UP.search(error.message) for error in errors):
        return _explain_late(view, earlier, wait, late)
    others = [fate for rank, fate in fates.items() if rank not in wait.held and rank not in late]
    is_first = all(fate.state in ("alive", "victim") for fate in others)
    have_stayed = all(_has_stayed(view, view.ranks[rank], first_ns) for rank in late)
    is_closed = is_first and have_stayed and all(fates[rank].state == "victim" for rank in wait.held)
    return _explain_closed(wait, late) if is_closed else None


def _explain_late(view: JobView, earlier: JobView | None, wait: Wait, late: tuple[int, ...]) -> Finding | None:
    then = replace(view, ranks={**view.ranks, **{rank: _running(view.ranks[rank]) for rank in late}})
    finding = explain_open(Open(then, earlier, wait, late), has_lasted=True)
    if finding is None:
        return None
    why = f"the group's `timeout` was over before {render_ranks(late)} came: {finding.why}"
    return replace(finding, severity="error", evidence=finding.evidence[:-1], why=why, fix=f"{finding.fix}; {_LONGER}")


def _is_over(wait: Wait, fates: Mapping[int, Fate]) -> list[bool]:
    return [fates[rank].state in ("victim", "died") for rank in wait.held]


def _ran_on(rank: RankView | None, fate: Fate, first_ns: int | None) -> bool:
    """True if the rank was alive when the first of the waiting ranks ended."""
    if rank is None or rank.error is not None or rank.returned:
        return False
    ended_ns = rank.process.ended_ns
    is_stopped = rank.process.signal_name in _BY_LAUNCHER and None not in (ended_ns, first_ns)
    return fate.state == "alive" or (is_stopped and (ended_ns or 0) > (first_ns or 0))


def _has_stayed(view: JobView, rank: RankView, first_ns: int | None) -> bool:
    """True if the rank did not close its connections by exiting: it would have closed its recording first."""
    if rank.log is None or rank.log.closed_ns is not None:
        return False
    is_long_ago = first_ns is not None and view.now_ns - first_ns > _ENDING_NS
    return rank.process.state == "ended" or is_long_ago


def _running(rank: RankView) -> RankView:
    return replace(rank, process=ProcessView(pid=rank.process.pid, host=rank.process.host, state="unknown"))


def _explain_closed(wait: Wait, late: tuple[int, ...]) -> Finding:
    assert wait.meeting is not None
    entry = wait.held[min(wait.held)]
    rows = [(rank, describe(each), say_place(each.line)) for rank, each in sorted(wait.held.items())]
    for rank in late:
        last = wait.meeting.progress.last(rank)
        where = f"its last was #{last.seq}: {say_call(last)}" if last is not None else ""
        rows.append((rank, "closed its connections, and ran on", where))
    words = (
        "closed its connections while others were" if len(late) == 1 else "closed their connections while others were"
    )
    return make_finding(
        "DDP216",
        severity="error",
        summary=f"{who_does(late, words)} in {describe_shortly(entry)} (#{wait.meeting.seq})",
        ranks=late,
        line=place_of(entry.line),
        evidence=lay_out(merge_rows(rows)),
        why=f"{render_ranks(late)} did not end by itself and its connections did: it destroyed its process group, or "
        "closed it after an error of its own, without calling this",
        fix=FIXES["DDP216"],
    )
