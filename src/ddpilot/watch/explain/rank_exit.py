# SPDX-License-Identifier: Apache-2.0
"""Explain ranks that ended, left their group or closed their connections while others needed them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.missed_collective import (
    FIXES,
    Cause,
    CollectiveSide,
    find_first_cause,
    show_common,
    side_in_collective,
    side_in_wait,
)
from ddpilot.watch.explain.open_waits import explain_open_wait, render_wait, render_waiting_for
from ddpilot.watch.explain.text import (
    Draft,
    describe_shortly,
    place_of,
    ranks_do,
    render_call,
    render_place,
    render_table,
    rows_of,
)
from ddpilot.watch.matching.outcomes import RankOutcome, first_deaths, without_end
from ddpilot.watch.matching.waits import Wait
from ddpilot.watch.snapshot.model import JobSnapshot, RankSnapshot
from ddpilot.watch.snapshot.stacks import chain_of

_DEATH_FIX = "check how it ended; the other ranks wait for it and fail with errors of their own"


def explain_exited(draft: Draft, wait: Wait, gone: Sequence[int]) -> Finding:
    """Return the finding for ranks that wait for ranks that have ended."""
    job, outcomes = draft.job, draft.outcomes
    ranks = _blame(job, gone, outcomes)
    words = outcomes[ranks[0]].words
    has_died = outcomes[ranks[0]].state != "finished"
    held = tuple(sorted(wait.held))
    one = side_in_wait(job, wait, held)
    cause = _find_cause(job, wait, one, ranks, has_died, draft.sources)
    code = cause.code if cause is not None else _code_of(wait, job.ranks.get(ranks[0]), has_died)
    at = cause.at if cause is not None else one.chain[-1] if one.chain else None
    if has_died and cause is None:
        error_chain = chain_of(job.ranks[ranks[0]], None) if ranks[0] in job.ranks else ()
        at = error_chain[-1] if error_chain else at
    rows = rows_of(wait.held)
    rows += [(rank, outcomes[rank].words, _render_end(wait, job.ranks.get(rank), rank)) for rank in gone]
    pronoun = "it" if len(ranks) == 1 else "them"
    return make_finding(
        code,
        severity="error",
        summary=f"{ranks_do(ranks, words)}, and {render_waiting_for(held)} {pronoun} in {render_wait(wait)}",
        ranks=cause.ranks if cause is not None and cause.ranks else ranks,
        line=place_of(at),
        evidence=(*render_table(rows), *show_common(wait.collective)),
        why=cause.why if cause is not None else _why(wait, ranks, words, has_died),
        fix=FIXES.get(code, _DEATH_FIX),
    )


def _code_of(wait: Wait, gone: RankSnapshot | None, has_died: bool) -> str:
    if has_died:
        return "DDP209"
    if wait.collective is None:
        return "DDP219"
    if gone is None or gone.log is None or gone.process.state != "running":
        return "DDP208"
    return "DDP208" if gone.has_closed_log else "DDP216"


def _blame(job: JobSnapshot, gone: Sequence[int], outcomes: Mapping[int, RankOutcome]) -> tuple[int, ...]:
    """Return the ranks, of those in `gone`, that ended first; all of them ended in the same way."""
    firsts = [rank for rank in first_deaths(job, dict(outcomes)) if rank in gone]
    for state in ("died", "finished", "victim"):
        of_state = [rank for rank in (firsts if state == "died" and firsts else gone) if outcomes[rank].state == state]
        if of_state:
            words = outcomes[of_state[0]].words
            return tuple(rank for rank in of_state if outcomes[rank].words == words)
    return tuple(gone)


def _find_cause(
    job: JobSnapshot, wait: Wait, one: CollectiveSide, gone: tuple[int, ...], has_died: bool, sources: Sources
) -> Cause | None:
    collective = wait.collective
    if collective is None:
        return None
    other = side_in_collective(job, collective.progress, gone, collective.seq)
    if not has_died:
        other = replace(other, chain=(), entry=None)
    cause = find_first_cause(job, collective, one, other, sources)
    if cause is None or (has_died and cause.code != "DDP212"):
        return None
    if cause.code == "DDP201":  # both ranks were in a collective where they split
        return Cause(code="DDP220", ranks=cause.ranks, why=cause.why, at=cause.at)
    return cause


def _render_end(wait: Wait, seen: RankSnapshot | None, rank: int) -> str:
    """Return the line at which the rank raised an exception, or its last collective."""
    chain = chain_of(seen, None) if seen is not None and seen.error is not None else ()
    return render_place(chain[-1]) if chain else _render_last(wait, rank)


def _render_last(wait: Wait, rank: int) -> str:
    last = wait.collective.progress.last(rank) if wait.collective is not None else None
    return f"its last was #{last.seq}: {render_call(last)}" if last is not None else ""


def _why(wait: Wait, ranks: Sequence[int], words: str, has_died: bool) -> str:
    if has_died:
        more = " (as the kernel does when memory runs out; see `dmesg`)" if "SIGKILL" in words else ""
        return f"{ranks_do(ranks, words)}{more}; the later errors of the other ranks are consequences"
    if wait.collective is None:
        return f"{ranks_do(ranks, words)} without the matching call"
    return f"{ranks_do(ranks, words)} without calling it: by a different code path, or with fewer iterations"


_TIME_IS_UP = re.compile(r"timed ?out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_LONGER = "a longer `timeout=` of init_process_group allows for operations that take long"
_ENDING_NS = 1_500_000_000
"""A rank that closes its connections because it exits has exited within this time."""
_BY_LAUNCHER = ("SIGTERM", "SIGINT")


def explain_outlasted(draft: Draft, wait: Wait) -> Finding | None:
    """Return the finding for ranks that had not arrived at the timeout, or closed their connections; None if neither.

    The launcher terminates the other ranks after a failure; a rank that it terminated counts as having continued.
    """
    job, outcomes = draft.job, draft.outcomes
    ended_ns = [job.ranks[rank].process.ended_ns for rank in wait.held if outcomes[rank].is_gone]
    first_ns = min((each for each in ended_ns if each is not None), default=None)
    late = tuple(rank for rank in wait.missing if _ran_on(job.ranks.get(rank), outcomes[rank], first_ns))
    are_over = all(outcomes[rank].state in ("victim", "died") for rank in wait.held)
    if wait.collective is None or not late or len(late) != len(wait.missing) or not are_over:
        return None
    errors = [job.ranks[rank].error for rank in wait.held]
    if any(error is not None and _TIME_IS_UP.search(error.message) for error in errors):
        return _explain_late(draft, wait, late)
    others = [outcome for rank, outcome in outcomes.items() if rank not in wait.held and rank not in late]
    is_first = all(outcome.state in ("alive", "victim") for outcome in others)
    have_stayed = all(_has_stayed(job, job.ranks[rank], first_ns) for rank in late)
    is_closed = is_first and have_stayed and all(outcomes[rank].state == "victim" for rank in wait.held)
    return _explain_closed(wait, late) if is_closed else None


def _explain_late(draft: Draft, wait: Wait, late: tuple[int, ...]) -> Finding | None:
    ranks = draft.job.ranks
    then = replace(draft.job, ranks={**ranks, **{rank: without_end(ranks[rank]) for rank in late}})
    finding = explain_open_wait(replace(draft, job=then), wait, late, has_lasted=True)
    if finding is None:
        return None
    why = f"the group's `timeout` expired before {render_ranks(late)} called it: {finding.why}"
    return replace(finding, severity="error", evidence=finding.evidence[:-1], why=why, fix=f"{finding.fix}; {_LONGER}")


def _ran_on(rank: RankSnapshot | None, outcome: RankOutcome, first_ns: int | None) -> bool:
    """True if the rank was alive when the first of the waiting ranks ended."""
    if rank is None or rank.error is not None or rank.returned:
        return False
    ended_ns = rank.process.ended_ns
    is_stopped = rank.process.signal_name in _BY_LAUNCHER and None not in (ended_ns, first_ns)
    return outcome.state == "alive" or (is_stopped and (ended_ns or 0) > (first_ns or 0))


def _has_stayed(job: JobSnapshot, rank: RankSnapshot, first_ns: int | None) -> bool:
    """True if the rank did not close its connections by exiting: it would have closed its recording first."""
    if rank.log is None or rank.has_closed_log:
        return False
    is_long_ago = first_ns is not None and job.now_ns - first_ns > _ENDING_NS
    return rank.process.state == "ended" or is_long_ago


def _explain_closed(wait: Wait, late: tuple[int, ...]) -> Finding:
    assert wait.collective is not None
    entry = wait.held[min(wait.held)]
    rows = rows_of(wait.held)
    rows += [(rank, "closed its connections and continued", _render_last(wait, rank)) for rank in late]
    words = ranks_do(late, "closed its connections while others were")
    return make_finding(
        "DDP216",
        severity="error",
        summary=f"{words} in {describe_shortly(entry)} (#{wait.collective.seq})",
        ranks=late,
        line=place_of(entry.line),
        evidence=render_table(rows),
        why=f"{render_ranks(late)} did not exit, but its connections were closed: it destroyed its process group, or "
        "closed it after an error of its own, without calling this",
        fix=FIXES["DDP216"],
    )


OF_ENDS = frozenset({"DDP208", "DDP209"})
"""Codes of findings about how a rank ended."""

_NEEDS_OTHERS = "DDP2"
_CONTINUES = "DDP204"
"""Different reduce-ops: the job does not stop because of them."""

_FIXES = {
    "SIGKILL": "check whether memory ran out (`dmesg | tail`): use fewer DataLoader workers, smaller batches",
    "SIGBUS": "check whether shared memory was full (`df /dev/shm`), or a mapped file was truncated; see "
    "ddpilot explain DDP601",
    "SIGSEGV": "check the native code that it used last; Python's fault handler printed where it was",
    "SIGABRT": "check its last lines: gloo and NCCL abort the process with a message",
}


def find_cause_of_end(findings: Iterable[Finding], rank: int) -> Finding | None:
    """Return the finding that makes `rank` fail as it waits for others; None if there is none.

    Findings about how `rank` itself ended are excluded.
    """
    errors = (each for each in findings if each.code.startswith(_NEEDS_OTHERS) and each.severity == "error")
    others = (each for each in errors if each.code not in OF_ENDS or each.ranks != (rank,))
    return next((each for each in others if each.code != _CONTINUES), None)


def explain_death(job: JobSnapshot, ranks: Sequence[int], words: str) -> Finding:
    """Return the DDP209 finding for `ranks`, which ended as `words` describe."""
    seen = job.ranks[ranks[0]]
    chain = chain_of(seen, None)
    last = seen.collectives[-1] if seen.collectives else None
    where = render_place(last.line) if last is not None else ""
    evidence = [f"its last was {f'{describe_shortly(last)}, {where}' if where else render_call(last)}"] if last else []
    signal_name = seen.process.signal_name or ""
    place = place_of(chain[-1]) if chain else place_of(last.line) if last is not None else None
    return make_finding(
        "DDP209",
        summary=ranks_do(ranks, words),
        ranks=tuple(ranks),
        line=place,
        evidence=tuple(evidence),
        why="the other ranks cannot continue without it: their later errors are consequences",
        fix=_FIXES.get(signal_name, "check its last lines and its traceback"),
    )
