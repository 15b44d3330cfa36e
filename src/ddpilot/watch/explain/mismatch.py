# SPDX-License-Identifier: Apache-2.0
"""Explain ranks that are in one collective with different arguments: a proven error even before any rank waits."""

from __future__ import annotations

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import Collective
from ddpilot.source.parsed_file import Sources
from ddpilot.watch.explain.causes import FIXES, Cause, Party, find_cause
from ddpilot.watch.explain.ddp_constructor import find_wrap_difference
from ddpilot.watch.explain.joined import find_joined
from ddpilot.watch.explain.reasons import Reason, find_reason, special_fix
from ddpilot.watch.explain.text import (
    describe,
    lay_out,
    merge_rows,
    name_group,
    place_of,
    say_call,
    say_place,
)
from ddpilot.watch.matching.all_to_all import EXCHANGES
from ddpilot.watch.matching.mismatch import SILENT, find_clash, terms_of
from ddpilot.watch.matching.progress import Meet, Progress
from ddpilot.watch.snapshot.model import Frame, JobView, RankView
from ddpilot.watch.snapshot.stacks import chain_of, chain_of_line

_CODES = {
    "op": "DDP201",
    "size": "DDP202",
    "dtype": "DDP203",
    "reduce-op": "DDP204",
    "root": "DDP205",
    "shape": "DDP202",
}
_OF_CONSTRUCTION = {"size": "DDP302", "dtype": "DDP303"}
_WORDS = {
    "op": "",
    "size": "in size",
    "dtype": "in dtype",
    "reduce-op": "in its reduce-op",
    "root": "in its root",
    "shape": "in shape",
}
_NUM_SAME = 32
"""After this many collectives from the same lines on all ranks, an earlier split no longer counts as the origin."""


def find_firsts(progress: Progress) -> list[Meet]:
    """Return the first mismatches of a group: at most one that does not stop training, and at most one that does."""
    terms: dict[tuple[int, int, str], object] = {}
    same: dict[object, object] = {}  # equal terms are one object, so that ranks are compared by identity
    first = progress.first_common
    by_seq: dict[int, dict[int, Collective]] = {}
    said: dict[int, tuple[object, int | None, str | None]] = {}
    odd: set[int] = set()
    for rank, entries in progress.by_rank.items():
        for entry in entries:
            seq = entry.seq
            if seq is None or seq < first:
                continue
            key = (id(entry.inputs), id(entry.outputs), entry.op)
            mine = terms.get(key)
            if mine is None:
                mine = terms_of(entry)
                mine = terms[key] = same.setdefault(mine, mine)
            here = by_seq.get(seq)
            if here is None:
                by_seq[seq] = {rank: entry}
                said[seq] = mine, entry.root, entry.reduce_op
                continue
            if said[seq] != (mine, entry.root, entry.reduce_op):
                odd.add(seq)
            here[rank] = entry
    # Exchanges of point-to-point parts are compared only where the ranks are now: comparing all of them takes too long.
    newest = max(map(progress.position, progress.by_rank))
    odd |= {seq for seq in (newest - 1, newest) if any(each.op in EXCHANGES for each in by_seq.get(seq, {}).values())}
    found: dict[bool, Meet] = {}
    for seq in sorted(odd):
        clash = find_clash(by_seq[seq])
        if clash is not None:
            found.setdefault(clash.aspect in SILENT, Meet(progress, seq, clash, by_seq[seq]))
        if False in found:
            break
    return list(found.values())


def explain_clash(view: JobView, meet: Meet, sources: Sources) -> Finding:
    """Return the finding for a mismatch, with its cause where the source and the logs determine it."""
    sides = [ranks for _, ranks in meet.clash.said]
    rest, odd = _party(view, meet, sides[0]), _party(view, meet, sides[1])
    cause = find_joined(meet.progress, meet.seq) or _find_cause(view, meet, rest, odd, sources)
    reason = find_reason(view, meet, rest.chain, odd.chain, sources) if cause is None else Reason()
    code = "DDP201" if reason.are_other_calls else _choose_code(meet, cause)
    wraps = find_wrap_difference(view) if code in _OF_CONSTRUCTION.values() else None
    if wraps is not None:
        code, cause = wraps.code, Cause(code=wraps.code, ranks=wraps.ranks, why=wraps.why)
    special = reason.fix if cause is None else cause.fix or special_fix(meet)
    smallest = min(sides, key=lambda ranks: (len(ranks), -ranks[0]))
    at = cause.at if cause is not None and cause.at is not None else _frame_of(meet.by_rank[smallest[0]])
    return make_finding(
        code,
        summary=_summarize(meet),
        ranks=(cause.ranks if cause is not None else ())
        or (smallest if len(sides) == 2 else tuple(sorted(meet.by_rank))),
        line=place_of(at),
        evidence=(*_show_sides(view, meet), *show_common(meet.progress, meet.seq)),
        why=cause.why if cause is not None else reason.why or _why(meet),
        fix=special or FIXES.get(code, ""),
    )


def _find_cause(view: JobView, meet: Meet, rest: Party, odd: Party, sources: Sources) -> Cause | None:
    if meet.clash.aspect != "op" and rest.chain[-1:] == odd.chain[-1:]:
        return None
    origin = find_origin(view, meet.progress, rest.ranks[0], odd.ranks[0], meet.seq, sources)
    return (find_cause(*origin, sources) if origin is not None else None) or find_cause(rest, odd, sources)


def _choose_code(meet: Meet, cause: Cause | None) -> str:
    parts = {entry.ddp.what for entry in meet.by_rank.values() if entry.ddp is not None}
    own = (_OF_CONSTRUCTION if parts == {"construction"} else _CODES).get(meet.clash.aspect, "DDP201")
    if len({entry.ddp and (entry.ddp.what, entry.ddp.names) for entry in meet.by_rank.values()}) > 1:
        own = "DDP201" if own in ("DDP202", "DDP203") else own  # different gradients, or one side has none
    if cause is None or (cause.code in ("DDP201", "DDP220") and not cause.is_branch):
        return own
    if cause.code in ("DDP201", "DDP220"):  # the arguments differ because the ranks are not in the same call
        return "DDP201" if own in ("DDP201", "DDP202", "DDP203") else own
    return cause.code


def _summarize(meet: Meet) -> str:
    values = [value for value, _ in meet.clash.said[:4]]
    said = ", ".join(values[:-1]) + f" and {values[-1]}"
    words = _WORDS[meet.clash.aspect]
    what = f" {words}: {said.replace(' elements and', ' and')}" if words else ""
    return f"collective #{meet.seq} of {name_group(meet.progress.group)} differs between ranks{what}"


def _why(meet: Meet) -> str:
    if meet.clash.aspect == "reduce-op":
        return "each rank reduces in its own way: the results differ between ranks, and nothing stops"
    if meet.clash.aspect == "shape":
        return "as many numbers in another order: what meets does not belong together, and nothing stops"
    if meet.clash.aspect == "op":
        return "collectives meet by their order in the group, whatever they are: some ranks are ahead, or elsewhere"
    return f"ranks that are in one collective have to agree about its {meet.clash.aspect}"


def _show_sides(view: JobView, meet: Meet) -> tuple[str, ...]:
    said = {rank: value for value, ranks in meet.clash.said for rank in ranks}
    rows = []
    for rank, entry in meet.by_rank.items():
        what = describe(entry)
        value = said.get(rank, "")
        if meet.clash.aspect in ("size", "root") and value not in what:
            what = f"{what} ({value})"
        rows.append((rank, what + _fate(view.ranks.get(rank)), say_place(entry.line)))
    return lay_out(merge_rows(rows))


def _fate(rank: RankView | None) -> str:
    signal_name = rank.process.signal_name if rank is not None else None
    return f", died of {signal_name}" if signal_name else ""


def show_common(progress: Progress, seq: int) -> tuple[str, ...]:
    """Return a line about the collective before `seq` that all ranks share; empty if the logs do not hold it."""
    entries = [entry for rank in progress.by_rank if (entry := progress.at(rank, seq - 1)) is not None]
    if not entries or len(entries) < len(progress.by_rank):
        return ()
    if len({(entry.op, entry.line and (entry.line.file, entry.line.line)) for entry in entries}) > 1:
        return ()  # different calls that were matched by their number
    return (f"in common until #{seq - 1}: {say_call(entries[0])}",)


def _party(view: JobView, meet: Meet, ranks: tuple[int, ...]) -> Party:
    return make_party(view, meet.progress, ranks, meet.seq)


def make_party(view: JobView, progress: Progress, ranks: tuple[int, ...], seq: int, *, stacks: bool = True) -> Party:
    """Build the party of `ranks` in collective `seq` from the first of them that has called it, or from the first."""
    rank = next((each for each in ranks if progress.at(each, seq) is not None), ranks[0])
    entry = progress.at(rank, seq)
    earlier = [each for each in progress.by_rank.get(rank, ()) if each.seq is not None and each.seq < seq]
    lines = frozenset((each.line.file, each.line.line) for each in earlier if each.line is not None)
    seen = view.ranks.get(rank)
    chain = chain_of(seen, entry) if seen is not None and stacks else ()
    if not chain and entry is not None:
        chain = chain_of_line(entry.line)
    error = seen.error.message if seen is not None and seen.error is not None else ""
    before = earlier[-1] if earlier else None
    return Party(
        ranks=ranks,
        chain=chain,
        entry=entry,
        before=before,
        lines=lines,
        error=error,
        passes=_passes_of(seen),
        knows_all_passes=seen is not None and any(note.index <= 1 for note in seen.journal[:1]),
        talk=any(each.ddp is None and each.op != "barrier" for each in earlier),
    )


def _passes_of(rank: RankView | None) -> dict[int, int]:
    found: dict[int, int] = {}
    for note in rank.journal if rank is not None else ():
        if note.kind == "loader_pass":
            found.pop(note.values["loader"], None)
            found[note.values["loader"]] = note.values["pass"]
    return found


def find_origin(
    view: JobView, progress: Progress, one: int, other: int, seq: int, sources: Sources
) -> tuple[Party, Party] | None:
    """Find where two ranks first called collectives from different lines, which may have caused the mismatch at `seq`.

    Returns their parties there; None if the lines do not differ, or the logs do not reach back far enough.
    """
    start = max(_first_seq(progress, one), _first_seq(progress, other))
    found, same = None, 0
    for number in range(seq - 1, start - 1, -1):
        pair = (progress.at(one, number), progress.at(other, number))
        if pair[0] is None or pair[1] is None or same > _NUM_SAME:
            break
        if _site(pair[0]) == _site(pair[1]) or _are_siblings(pair[0], pair[1], sources):
            same += 1
        else:
            found, same = number, 0
    if found is None or (found == start and start > 0):
        return None
    return tuple(make_party(view, progress, (rank,), found, stacks=False) for rank in (one, other))  # type: ignore[return-value]


def _first_seq(progress: Progress, rank: int) -> int:
    entries = progress.by_rank.get(rank)
    return entries[0].seq or 0 if entries else 0


def _site(entry: Collective) -> tuple[object, ...]:
    part = entry.ddp
    return (*((frame.file, frame.line) for frame in chain_of_line(entry.line)), part and (part.what, part.index))


def _are_siblings(one: Collective, other: Collective, sources: Sources) -> bool:
    """True if the two call paths split at different branches of one condition, as the two sides of a broadcast may."""
    ways = zip(chain_of_line(one.line), chain_of_line(other.line), strict=False)
    parted = ((first, second) for first, second in ways if (first.file, first.line) != (second.file, second.line))
    first, second = next(parted, (None, None))
    source = sources.find(first) if first is not None else None
    if source is None or first is None or second is None or first.file != second.file:
        return False
    nodes = {id(block.node): block.part for block in source.blocks(first.line)}
    return any(nodes.get(id(block.node), block.part) != block.part for block in source.blocks(second.line))


def _frame_of(entry: Collective) -> Frame | None:
    line = entry.line
    return Frame(line.file, line.line, line.function, line.text) if line is not None and line.file else None


def involved(meet: Meet) -> tuple[int, ...]:
    """Return one rank of each side: their stacks show the most."""
    return tuple(ranks[0] for _, ranks in meet.clash.said)
