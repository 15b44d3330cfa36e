# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet in one collective with different ideas of it: proof, whether or not anybody waits yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpilot.findings.catalog import find_entry
from ddpilot.findings.finding import Finding
from ddpilot.findings.words import render_ranks
from ddpilot.record.agreement import SILENT, Clash, find_clash, terms_of
from ddpilot.record.exchange import EXCHANGES
from ddpilot.record.log import Collective
from ddpilot.watch.causes import FIXES, NAMES, Cause, Party, find_cause
from ddpilot.watch.meetings import Progress
from ddpilot.watch.source import Sources
from ddpilot.watch.stacks import chain_of
from ddpilot.watch.view import Frame, JobView, RankView
from ddpilot.watch.words import (
    describe,
    describe_shortly,
    lay_out,
    merge_rows,
    name_group,
    place_of,
    say_place,
    say_spot,
)

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
_THREAD_FIX = "give the thread a group of its own (`dist.new_group()` on all ranks), or call from one thread only"
_SHAPE_FIX = "give tensors of one shape on all ranks: `transpose` or `permute` where they are turned"
_EXCHANGE_FIX = "let each rank expect what the others give: exchange the split sizes first, with an even all_to_all"
_NUM_SAME = 32
"""After so many collectives from the same lines on all ranks, nothing is a consequence of what was before."""


@dataclass(frozen=True, slots=True)
class Meet:
    """A collective about which ranks do not agree."""

    progress: Progress
    seq: int
    clash: Clash
    by_rank: Mapping[int, Collective]

    @property
    def newest_ns(self) -> int:
        """When the last of them began it."""
        return max(entry.start_ns for entry in self.by_rank.values())


def find_firsts(progress: Progress) -> list[Meet]:
    """The first collectives of a group about which its ranks do not agree: one that goes on silently, and another."""
    terms: dict[tuple[int, int, str], object] = {}
    first = progress.first_common
    by_seq: dict[int, dict[int, Collective]] = {}
    odd: set[int] = set()
    for rank, entries in progress.by_rank.items():
        for entry in entries:
            if entry.seq is None or entry.seq < first:
                continue
            here = by_seq.setdefault(entry.seq, {})
            key = (id(entry.inputs), id(entry.outputs), entry.op)
            said = terms.get(key) or terms.setdefault(key, terms_of(entry))
            if here and entry.seq not in odd:
                other = next(iter(here.values()))
                known = terms[id(other.inputs), id(other.outputs), other.op]
                if said != known or _may_clash(entry, other):
                    odd.add(entry.seq)
            here[rank] = entry
    # What is exchanged pair by pair is looked at where ranks are now: all of it would take too long.
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


def _may_clash(entry: Collective, other: Collective) -> bool:
    return entry.root != other.root or entry.reduce_op != other.reduce_op


def explain_clash(view: JobView, meet: Meet, sources: Sources) -> Finding:
    """What is wrong, with the cause where the source and the logs say it."""
    sides = [ranks for _, ranks in meet.clash.said]
    rest, odd = _party(view, meet, sides[0]), _party(view, meet, sides[1])
    cause = None
    if meet.clash.aspect == "op" or rest.chain[-1:] != odd.chain[-1:]:
        origin = find_origin(view, meet.progress, rest.ranks[0], odd.ranks[0], meet.seq, sources)
        cause = (find_cause(*origin, sources) if origin is not None else None) or find_cause(rest, odd, sources)
    code = _choose_code(meet, cause)
    known = None if code in FIXES else find_entry(code)
    thread = _say_thread(view, meet) if cause is None else ""
    special = _THREAD_FIX if thread else _special_fix(meet)
    smallest = min(sides, key=lambda ranks: (len(ranks), -ranks[0]))
    at = cause.at if cause is not None else _frame_of(meet.by_rank[smallest[0]])
    return Finding(
        code=code,
        name=known.name if known is not None else NAMES[code],
        severity="error",
        summary=_summarize(meet),
        ranks=(cause.ranks if cause is not None else ())
        or (smallest if len(sides) == 2 else tuple(sorted(meet.by_rank))),
        place=place_of(at),
        evidence=(*_show_sides(view, meet), *show_common(meet.progress, meet.seq)),
        why=cause.why if cause is not None else thread or _why(meet),
        fix=special or (known.first_fix if known is not None else FIXES[code]),
        source=f"ddpilot explain {code}",
    )


def _special_fix(meet: Meet) -> str:
    if meet.clash.aspect == "shape":
        return _SHAPE_FIX
    is_exchange = any(entry.op in EXCHANGES for entry in meet.by_rank.values())
    return _EXCHANGE_FIX if is_exchange and meet.clash.aspect == "size" else ""


def _say_thread(view: JobView, meet: Meet) -> str:
    """That one of them comes from a thread beside the program's main one; empty where none does."""
    for rank, entry in sorted(meet.by_rank.items()):
        seen = view.ranks.get(rank)
        main = seen.log.pid if seen is not None and seen.log is not None else 0  # a main thread has its process's id
        if entry.ddp is None and main not in (0, entry.thread) and _is_shared(meet.progress.by_rank[rank], main):
            spot = say_spot(entry.line)
            return f"{render_ranks([rank])} calls the one at {spot} from another thread: threads come in any order"
    return ""


def _is_shared(entries: Sequence[Collective], thread: int) -> bool:
    return any(entry.thread == thread for entry in entries)


def _choose_code(meet: Meet, cause: Cause | None) -> str:
    parts = {entry.ddp.what for entry in meet.by_rank.values() if entry.ddp is not None}
    own = (_OF_CONSTRUCTION if parts == {"construction"} else _CODES).get(meet.clash.aspect, "DDP201")
    if len({entry.ddp and (entry.ddp.what, entry.ddp.names) for entry in meet.by_rank.values()}) > 1:
        own = "DDP201" if own in ("DDP202", "DDP203") else own  # different gradients, or none on one side
    if cause is None or (cause.code in ("DDP201", "DDP220") and not cause.is_branch):
        return own
    if cause.code in ("DDP201", "DDP220"):  # what they give differs because they are not in the same call
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
    """A line on what all ranks did together before the number `seq`; none where the logs do not hold it."""
    entries = [entry for rank in progress.by_rank if (entry := progress.at(rank, seq - 1)) is not None]
    if not entries or len(entries) < len(progress.by_rank):
        return ()
    spot = say_spot(entries[0].line)
    return (f"in common until #{seq - 1}: {describe_shortly(entries[0])}" + (f", {spot}" if spot else ""),)


def _party(view: JobView, meet: Meet, ranks: tuple[int, ...]) -> Party:
    return make_party(view, meet.progress, ranks, meet.seq)


def make_party(view: JobView, progress: Progress, ranks: tuple[int, ...], seq: int, *, stacks: bool = True) -> Party:
    """The party of `ranks` in the collective `seq`, told by the first of them that is in it, else by the first."""
    rank = next((each for each in ranks if progress.at(each, seq) is not None), ranks[0])
    entry = progress.at(rank, seq)
    earlier = [each for each in progress.by_rank.get(rank, ()) if each.seq is not None and each.seq < seq]
    lines = frozenset((each.line.file, each.line.line) for each in earlier if each.line is not None)
    seen = view.ranks.get(rank)
    chain = chain_of(seen, entry) if seen is not None and stacks else ()
    if not chain and entry is not None:
        frame = _frame_of(entry)
        chain = (frame,) if frame is not None else ()
    error = seen.error.message if seen is not None and seen.error is not None else ""
    before = earlier[-1] if earlier else None
    return Party(ranks=ranks, chain=chain, entry=entry, before=before, lines=lines, error=error)


def find_origin(
    view: JobView, progress: Progress, one: int, other: int, seq: int, sources: Sources
) -> tuple[Party, Party] | None:
    """Where two ranks began to ask from different lines, of which what happens at `seq` may be a consequence."""
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
    line, part = entry.line, entry.ddp
    return (line and (line.file, line.line), part and (part.what, part.index))


def _are_siblings(one: Collective, other: Collective, sources: Sources) -> bool:
    """Whether they stand in both branches of one condition, as the sides of a broadcast may."""
    first, second = _frame_of(one), _frame_of(other)
    source = sources.find(first) if first is not None else None
    if source is None or first is None or second is None or first.file != second.file:
        return False
    nodes = {id(block.node): block.part for block in source.blocks(first.line)}
    return any(nodes.get(id(block.node), block.part) != block.part for block in source.blocks(second.line))


def _frame_of(entry: Collective) -> Frame | None:
    line = entry.line
    return Frame(line.file, line.line, line.function, line.text) if line is not None and line.file else None


def involved(meet: Meet) -> tuple[int, ...]:
    """One rank of each side: those whose stacks say more."""
    return tuple(ranks[0] for _, ranks in meet.clash.said)
