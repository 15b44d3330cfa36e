# SPDX-License-Identifier: Apache-2.0
"""Explain ranks that are in one collective with different arguments, or wrap different models in DDP.

The reasons that no branch shows: different calls or threads, their order, loops over sets, and DDP's Join.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ddpilot.errors import list_names
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import Collective
from ddpilot.source.control_flow import find_unordered_loop
from ddpilot.source.parsed_file import Chain, Sources
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.missed_collective import (
    FIXES,
    Cause,
    CollectiveSide,
    find_first_cause,
    show_common,
    side_in_collective,
)
from ddpilot.watch.explain.text import (
    describe,
    describe_shortly,
    name_group,
    place_of,
    ranks_do,
    render_death,
    render_place,
    render_position,
    render_table,
    show_file,
)
from ddpilot.watch.matching.mismatch import EXCHANGES, MismatchedCollective, signature_of
from ddpilot.watch.matching.progress import GroupProgress
from ddpilot.watch.snapshot.model import JobSnapshot

_MESSAGES = ("DDP expects same model across all ranks", "of the same param in process 0")
_MAX_NAMED = 4
_Parameters = Mapping[str, tuple[Any, str, bool]]
"""By name: shape, dtype, and True if it requires gradients."""


def explain_wraps(job: JobSnapshot) -> Finding | None:
    """Return the finding if DDP rejected models because they differ; None if guard noted no difference."""
    errors = [seen.error.message for seen in job.ranks.values() if seen.error is not None]
    if not any(message in error for error in errors for message in _MESSAGES):
        return None
    found = find_wrap_difference(job)
    if found is None:
        return None
    cause, lines = found
    rows = [(rank, "in DDP's constructor", render_place(line)) for rank, line in lines.items()]
    return make_finding(
        cause.code,
        ranks=cause.ranks,
        line=place_of(lines[cause.ranks[0]]),
        evidence=render_table(rows),
        why=cause.why,
    )


def find_wrap_difference(job: JobSnapshot) -> tuple[Cause, Mapping[int, CodeLine | None]] | None:
    """Compare the models that ranks wrapped last, after the same number of collectives of one group; None if equal.

    Also returns where each rank wraps its model. Of two ranks, the second is the one that differs.
    """
    notes = {rank: note for rank, seen in job.ranks.items() if (note := _newest(seen.journal)) is not None}
    keys = {rank: (note["group"], note["at"]) for rank, note in notes.items()}
    together = max((sorted(r for r in keys if keys[r] == key) for key in keys.values()), key=len, default=[])
    if len(together) < 2 or any(len(notes[rank]["parameters"]) < notes[rank]["num_parameters"] for rank in together):
        return None
    models = {rank: _parameters(notes[rank]) for rank in together}
    lines = {rank: _line_of(notes[rank]["site"]) for rank in together}
    for code, ask in _ASPECTS:
        values = {rank: ask(model) for rank, model in models.items()}
        if any(each != values[together[0]] for each in values.values()):
            usual = max(together, key=lambda rank: (sum(values[rank] == each for each in values.values()), -rank))
            odd = tuple(rank for rank in together if values[rank] != values[usual])
            why = _describe_difference(code, usual, models[usual], odd[0], models[odd[0]])
            return Cause(code=code, ranks=odd, why=why), lines
    return None


def _newest(journal: tuple[Any, ...]) -> Mapping[str, Any] | None:
    return next((note.values for note in reversed(journal) if note.kind == "wrapping"), None)


def _parameters(note: Mapping[str, Any]) -> _Parameters:
    return {name: (tuple(shape), dtype, trains) for name, shape, dtype, trains in note["parameters"]}


def _line_of(site: Mapping[str, Any]) -> CodeLine | None:
    if not site.get("file"):
        return None
    return CodeLine(site["file"], site["line"], site.get("function", ""), site.get("text", ""))


_ASPECTS: tuple[tuple[str, Callable[[_Parameters], Any]], ...] = (
    ("DDP301", lambda model: list(model)),
    ("DDP302", lambda model: [shape for shape, _, _ in model.values()]),
    ("DDP304", lambda model: [trains for _, _, trains in model.values()]),
    ("DDP303", lambda model: [dtype for _, dtype, _ in model.values()]),
)


def _show(names: list[str]) -> str:
    return list_names([f"`{name}`" for name in names], _MAX_NAMED)


def _describe_difference(code: str, one: int, first: _Parameters, other: int, second: _Parameters) -> str:
    here, there = render_ranks([one]), render_ranks([other])
    if code == "DDP301":
        more = {here: [name for name in first if name not in second], there: [n for n in second if n not in first]}
        own = [f"only {who} has {_show(names)}" for who, names in more.items() if names]
        return "; ".join(own) or f"{here} and {there} have the same parameters in a different order"
    at = {"DDP302": 0, "DDP303": 1, "DDP304": 2}[code]
    different = [name for name in first if first[name][at] != second[name][at]]
    if code == "DDP304":
        frozen = [name for name in different if not second[name][2]]
        where, but_not, names = (there, here, frozen) if frozen else (here, there, different)
        return f"{_show(names)} {'is' if len(names) == 1 else 'are'} frozen on {where} but not on {but_not}"
    name = different[0]
    values = [list(model[name][0]) if at == 0 else model[name][1] for model in (first, second)]
    return f"`{name}` is {values[0]} on {here} and {values[1]} on {there}"


_CODES = {
    "op": "DDP201",
    "size": "DDP202",
    "dtype": "DDP203",
    "reduce-op": "DDP204",
    "root": "DDP205",
    "shape": "DDP202",
}
_REPEATED_UNIT = re.compile(" elements?(?= and)")
_OF_CONSTRUCTION = {"size": "DDP302", "dtype": "DDP303"}
_WORDS = {
    "op": "",
    "size": "in size",
    "dtype": "in dtype",
    "reduce-op": "in its reduce-op",
    "root": "in its root",
    "shape": "in shape",
}


def explain_mismatch(job: JobSnapshot, mismatched: MismatchedCollective, sources: Sources) -> Finding:
    """Return the finding for a mismatch, with its cause where the source and the logs determine it."""
    sides = mismatched.sides
    progress, seq = mismatched.progress, mismatched.seq
    rest, odd = (side_in_collective(job, progress, ranks, seq) for ranks in sides[:2])
    cause = _find_join_cause(progress, seq) or _find_cause(job, mismatched, rest, odd, sources)
    if cause is not None:
        cause = replace(cause, code=_choose_code(mismatched, cause))
    else:
        cause = _explain_from_logs(job, mismatched, rest.chain, odd.chain, sources)
    wraps = find_wrap_difference(job) if cause.code in _OF_CONSTRUCTION.values() else None
    if wraps is not None:
        cause = wraps[0]
    smallest = min(sides, key=lambda ranks: (len(ranks), -ranks[0]))
    return make_finding(
        cause.code,
        summary=_summarize(mismatched),
        ranks=cause.ranks or (smallest if len(sides) == 2 else tuple(sorted(mismatched.by_rank))),
        line=place_of(cause.at or mismatched.by_rank[smallest[0]].line),
        evidence=(*_show_sides(job, mismatched), *show_common(mismatched)),
        why=cause.why,
        fix=cause.fix or _special_fix(mismatched) or FIXES.get(cause.code, ""),
    )


def _find_cause(
    job: JobSnapshot, mismatched: MismatchedCollective, rest: CollectiveSide, odd: CollectiveSide, sources: Sources
) -> Cause | None:
    lines = [[frame.position for frame in side.chain[-1:]] for side in (rest, odd)]
    if mismatched.aspect != "op" and lines[0] == lines[1]:
        return None
    return find_first_cause(job, mismatched, rest, odd, sources)


def _own_code(mismatched: MismatchedCollective) -> str:
    parts = {entry.ddp.what for entry in mismatched.by_rank.values() if entry.ddp is not None}
    own = (_OF_CONSTRUCTION if parts == {"construction"} else _CODES).get(mismatched.aspect, "DDP201")
    if len({entry.ddp and (entry.ddp.what, entry.ddp.names) for entry in mismatched.by_rank.values()}) > 1:
        return "DDP201" if own in ("DDP202", "DDP203") else own  # different gradients, or one side has none
    return own


def _choose_code(mismatched: MismatchedCollective, cause: Cause) -> str:
    own = _own_code(mismatched)
    if cause.code in ("DDP201", "DDP220") and not cause.is_branch:
        return own
    if cause.code in ("DDP201", "DDP220"):  # the arguments differ because the ranks are not in the same call
        return "DDP201" if own in ("DDP201", "DDP202", "DDP203") else own
    return cause.code


def _summarize(mismatched: MismatchedCollective) -> str:
    values = [value for value, _ in mismatched.values[:4]]
    texts = ", ".join(values[:-1]) + f" and {values[-1]}"
    words = _WORDS[mismatched.aspect]
    what = f" {words}: {_REPEATED_UNIT.sub('', texts)}" if words else ""
    return f"collective #{mismatched.seq} of {name_group(mismatched.progress.group)} differs between ranks{what}"


def _why(mismatched: MismatchedCollective) -> str:
    if mismatched.aspect == "reduce-op":
        return "each rank uses its own reduce-op: the results differ between ranks, and training continues"
    if mismatched.aspect == "shape":
        return "the shapes are transposed: elements that do not belong together are combined, and training continues"
    if mismatched.aspect == "op":
        return "collectives are matched by their order in the group: some ranks are ahead, or took a different path"
    return f"all ranks of a collective must pass the same {mismatched.aspect}"


def _show_sides(job: JobSnapshot, mismatched: MismatchedCollective) -> tuple[str, ...]:
    by_rank = {rank: value for value, ranks in mismatched.values for rank in ranks}
    rows = []
    for rank, entry in mismatched.by_rank.items():
        what = describe(entry)
        value = by_rank.get(rank, "")
        if mismatched.aspect in ("size", "root") and value not in what:
            what = f"{what} ({value})"
        rows.append((rank, what + render_death(job.ranks.get(rank)), render_place(entry.line)))
    return render_table(rows)


_THREAD_FIX = (
    "run the thread on all ranks and give it its own group (`dist.new_group()` on all ranks), or call from one "
    "thread only"
)
_SHAPE_FIX = "pass tensors of the same shape on all ranks: apply `transpose` or `permute` where they differ"
_EXCHANGE_FIX = "make each rank expect what the others send: exchange the split sizes first, in an even all_to_all"
_DIFFERENT_BUCKETS = (
    "these are gradients of different parameters, for example of a second model, since DDP compares sizes when it "
    "wraps a model: the ranks run backward passes in a different order, or some run one more"
)


def _explain_from_logs(
    job: JobSnapshot, mismatched: MismatchedCollective, one: Chain, other: Chain, sources: Sources
) -> Cause:
    """Return the first reason that applies to the two sides of `mismatched`, whose calls are `one` and `other`.

    If none does: what a mismatch of this kind means.
    """
    code, thread = _own_code(mismatched), _render_thread(job, mismatched)
    different_calls = changed_order = ""
    if mismatched.aspect in ("size", "dtype"):
        first, second = mismatched.sides[:2]
        different_calls = _describe_different_calls(mismatched, first, second)
        changed_order = _describe_changed_order(mismatched.progress, mismatched.seq, first, second)
    if thread or different_calls:
        code = "DDP201" if different_calls else code
        return Cause(code=code, ranks=(), why=thread or different_calls, fix=_THREAD_FIX if thread else "")
    unordered = _describe_unordered_loop(one, other, sources)
    if unordered:
        return Cause(code=code, ranks=(), why=unordered, fix=_UNORDERED_FIX)
    fix = _ORDER_FIX if changed_order else ""
    return Cause(code=code, ranks=(), why=changed_order or _why(mismatched), fix=fix)


def _special_fix(mismatched: MismatchedCollective) -> str:
    """Return the fix for arguments of this kind; empty if the usual fix for the code applies."""
    if mismatched.aspect == "shape":
        return _SHAPE_FIX
    is_exchange = any(entry.op in EXCHANGES for entry in mismatched.by_rank.values())
    return _EXCHANGE_FIX if is_exchange and mismatched.aspect == "size" else ""


def _render_thread(job: JobSnapshot, mismatched: MismatchedCollective) -> str:
    """Return a sentence if one of the calls comes from a thread other than the main thread; empty otherwise."""
    for rank, entry in sorted(mismatched.by_rank.items()):
        main, entries = _main_thread(job, rank), mismatched.progress.by_rank[rank]
        if entry.ddp is None and main not in (0, entry.thread) and any(each.thread == main for each in entries):
            others = [each for each in mismatched.by_rank if each != rank]
            is_only = not any(_calls_from_threads(job, mismatched, each) for each in others)
            unlike = f", unlike {render_ranks(others)}" if is_only else ""
            who, position = render_ranks([rank]), render_position(entry.line)
            return f"{who} calls the one at {position} from a second thread{unlike}: their order varies"
    return ""


def _main_thread(job: JobSnapshot, rank: int) -> int:
    """Return the id of the main thread, which is the pid; 0 if it is unknown."""
    seen = job.ranks.get(rank)
    return seen.log.pid if seen is not None and seen.log is not None else 0


def _calls_from_threads(job: JobSnapshot, mismatched: MismatchedCollective, rank: int) -> bool:
    """True if `rank` has called collectives, other than DDP's, outside its main thread."""
    main = _main_thread(job, rank)
    return any(entry.ddp is None and entry.thread != main for entry in mismatched.progress.by_rank.get(rank, ()))


_ORDER_FIX = (
    "make these calls in the same order on all ranks: sort the items (a set has no order), and pass zeros where a "
    "rank has no value"
)
_MIN_TIMES = 2
"""A call counts as the regular successor if it followed the same call this often, with no exception."""


def _describe_different_calls(mismatched: MismatchedCollective, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return a sentence if the sides make different calls, both of which both have made before; empty otherwise."""
    mine, theirs = mismatched.by_rank[one[0]], mismatched.by_rank[other[0]]
    if (
        _call_site(mine) == _call_site(theirs)
        or not _has_called(mismatched, one[0], theirs)
        or not _has_called(mismatched, other[0], mine)
    ):
        # DDP compares the sizes of the same parameters when it wraps a model: different sizes mean different ones.
        are_buckets = all(each.ddp is not None and each.ddp.what == "bucket" for each in (mine, theirs))
        return _DIFFERENT_BUCKETS if are_buckets and mismatched.aspect == "size" else ""
    spots = (
        f"{render_ranks(one)} at {render_position(mine.line)}, {render_ranks(other)} at {render_position(theirs.line)}"
    )
    return f"these are two different calls, which all ranks make: {spots}; some ranks are ahead, or make one more"


def _describe_changed_order(progress: GroupProgress, seq: int, one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return a sentence if one side makes the usual call at `seq` and the other a known other call; else empty."""
    for keeps, leaves in ((one, other), (other, one)):
        before, mine, theirs = progress.at(keeps[0], seq - 1), progress.at(keeps[0], seq), progress.at(leaves[0], seq)
        if before is None or mine is None or theirs is None:
            continue
        entries = [each for each in progress.by_rank[keeps[0]] if each.seq is not None and each.seq < seq]
        after = [_key(later) for each, later in pairwise(entries) if _key(each) == _key(before)]
        if len(after) >= _MIN_TIMES and set(after) == {_key(mine)} and _key(theirs) in map(_key, entries):
            usual = f"so far, {describe(mine)} has always followed the previous call, as on {render_ranks(keeps)}"
            return f"{usual}; {ranks_do(leaves, 'makes')} a different known call: one is left out or out of order"
    return ""


def _has_called(mismatched: MismatchedCollective, rank: int, like: Collective) -> bool:
    entries = mismatched.progress.by_rank[rank]
    return any(_call_site(each) == _call_site(like) for each in entries if (each.seq or 0) < mismatched.seq)


def _call_site(entry: Collective) -> Hashable:
    return entry.line.position if entry.line is not None else None


def _key(entry: Collective) -> Hashable:
    return signature_of(entry), _call_site(entry)


_JOIN_FUNCTIONS = ("Join.__exit__", "__exit__")  # without the class name before Python 3.11
_JOIN_FIX = (
    "call no other collective in a loop within Join: sum on each rank, and all_reduce once after the loop; or "
    "give all ranks the same number of batches"
)


def _find_join_cause(progress: GroupProgress, seq: int) -> Cause | None:
    """Return the cause if a collective of Join was matched with one of the program up to `seq`; None otherwise."""
    cause = None
    for number in range(seq, -1, -1):  # the first one of the uninterrupted run of Join's collectives
        here = progress.all_at(number)
        joined = [rank for rank, entry in here.items() if entry.line and entry.line.via in _JOIN_FUNCTIONS]
        if not joined:
            break
        others = [rank for rank, each in here.items() if rank not in joined and each.ddp is None and each.line]
        if others:
            cause = _explain_join(tuple(joined), here[joined[0]], tuple(others), here[others[0]])
    return cause


def _explain_join(joined: tuple[int, ...], joins: Collective, others: tuple[int, ...], own: Collective) -> Cause:
    assert joins.line is not None
    assert own.line is not None
    who = f"{render_ranks(joined)} {'has' if len(joined) == 1 else 'have'} no more batches and"
    answers = f"{'waits' if len(joined) == 1 else 'wait'} in Join ({render_position(joins.line)})"
    why = (
        f"{who} {answers}, which matches only DDP's collectives: the {describe_shortly(own)} of "
        f"{render_ranks(others)} at {render_position(own.line)} (#{own.seq}) was matched with one of Join's"
    )
    return Cause(code="DDP207", ranks=others, why=why, at=own.line, fix=_JOIN_FIX)


_UNORDERED_FIX = "iterate over `sorted(...)` of it, or over a list or a dict that all ranks fill in the same order"


def _describe_unordered_loop(one: Chain, other: Chain, sources: Sources) -> str:
    """Return a sentence if both call chains are at one line in a loop over a set; empty otherwise.

    For one of them only its line may be known.
    """
    num_common = min(len(one), len(other))
    ends = [[frame.position for frame in chain[len(chain) - num_common :]] for chain in (one, other)]
    if not num_common or ends[0] != ends[1]:
        return ""
    for frame in reversed(max(one, other, key=len)):
        source = sources.find(frame)
        line = find_unordered_loop(source, frame.line) if source is not None else None
        if source is not None and line is not None:
            position = f"`{source.text(line)}` ({show_file(frame.file)}:{line})"
            return f"{position} iterates over a set, whose order differs between processes"
    return ""
