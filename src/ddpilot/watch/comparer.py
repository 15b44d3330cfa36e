# SPDX-License-Identifier: Apache-2.0
"""Compare what ranks do together while their logs grow: each record once, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddpilot.record.agreement import Clash, find_clash, terms_of
from ddpilot.record.log import Collective, GroupOfRanks, RankLog

MAX_OPEN = 16_384
"""Collectives of a group that are held at most until its last rank comes; a ring holds half as many."""
MAX_GROUPS = 1_024
SETTLE_NS = 500_000_000
"""So long after its start a collective's reduce-op is in the ring, or never will be."""

_REDUCING = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    }
)
_Age = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A collective that two ranks are in with different ideas of it, told by the first two that show it."""

    group: GroupOfRanks
    seq: int
    clash: Clash
    by_rank: Mapping[int, Collective]


@dataclass(slots=True)
class _Slot:
    """One collective of a group, as the first rank that came called it, and who has come."""

    rank: int
    entry: Collective
    terms: object
    arrived: int


@dataclass(slots=True)
class _Group:
    age: _Age
    everybody: int
    """Of its ranks those that are compared, as bits."""
    slots: dict[int, _Slot] = field(default_factory=dict)
    is_apart: bool = False
    """Its ranks are in different collectives: what comes after that says nothing."""
    told: set[tuple[str, str]] = field(default_factory=set)
    num_dropped: int = 0


class Comparer:
    """Compares the collectives of `ranks` by their group and number there, whatever is fed first.

    `after` says from which record on a rank's ring has to be read; memory is bounded by what ranks are apart, and by
    `max_open` collectives per group however far that is. A pair of ranks that uses different reduce-ops is told once
    for each place; a group whose ranks are in different collectives is told once, and compared again when it is made
    anew.
    """

    def __init__(self, ranks: Iterable[int], *, max_open: int = MAX_OPEN) -> None:
        self._bits = {rank: 1 << number for number, rank in enumerate(sorted(ranks))}
        self._max_open = max_open
        self._groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._after: dict[int, tuple[int, int]] = {}

    def after(self, rank: int) -> int:
        """The index of the newest record of `rank` that is compared for good: `read_ring(path, after=...)`."""
        return self._after.get(rank, (0, 0))[1]

    @property
    def num_open(self) -> int:
        """Collectives that are held until more ranks come."""
        return sum(len(group.slots) for group in self._groups.values())

    def feed(self, log: RankLog, now_ns: int) -> list[Disagreement]:
        """Compare the records of `log` that are new, in their order; what is wrong with them.

        Stops at a record whose reduce-op is still to come, half a second at most: it is to be fed again.
        """
        found: list[Disagreement] = []
        bit = self._bits.get(log.rank)
        if bit is None:
            return found
        started_ns, after = self._after.get(log.rank, (log.started_ns, 0))
        if started_ns != log.started_ns:  # started anew
            after = 0
        group: _Group | None = None
        terms: object = None
        last_own: GroupOfRanks | None = None
        last_kind: tuple[object, ...] = ("", None, None)  # most are like the one before
        for entry in log.collectives:
            if entry.index <= after:
                continue
            if entry.reduce_op is None and entry.op in _REDUCING and now_ns - entry.start_ns < SETTLE_NS:
                break
            after = entry.index
            seq, own = entry.seq, entry.group
            if seq is None or own is None:
                continue
            if own is not last_own:
                group, last_own = self._find_group(own), own
            if group is None or group.is_apart:
                continue
            kind = (entry.op, entry.inputs, entry.outputs)
            if last_kind[1] is not kind[1] or last_kind[2] is not kind[2] or last_kind[0] != kind[0]:
                last_kind, terms = kind, terms_of(entry)
            slot = group.slots.get(seq)
            if slot is None:
                if bit != group.everybody:
                    group.slots[seq] = _Slot(log.rank, entry, terms, bit)
                    self._bound(group)
                continue
            slot.arrived |= bit
            if slot.arrived == group.everybody:
                del group.slots[seq]
            other = slot.entry
            if terms != slot.terms or entry.root != other.root or entry.reduce_op != other.reduce_op:
                found += _judge(group, seq, slot, log.rank, entry)
        self._after[log.rank] = (log.started_ns, after)
        return found

    def _bound(self, group: _Group) -> None:
        if len(group.slots) > self._max_open:
            del group.slots[next(iter(group.slots))]
            group.num_dropped += 1

    def _find_group(self, group: GroupOfRanks) -> _Group | None:
        key, age = (group.name, group.ranks), (group.attempt, group.incarnation)
        known = self._groups.get(key)
        if known is None or known.age < age:
            everybody = sum(self._bits.get(rank, 0) for rank in group.ranks)
            self._groups.pop(key, None)
            self._groups[key] = known = _Group(age, everybody)
            if len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        return known if known.age == age else None


def _judge(group: _Group, seq: int, slot: _Slot, rank: int, entry: Collective) -> list[Disagreement]:
    by_rank = {slot.rank: slot.entry, rank: entry}
    if slot.entry.reduce_op is None:
        slot.rank, slot.entry = rank, entry
    clash = find_clash(by_rank)
    if clash is None or len(by_rank) < 2 or entry.group is None:
        return []
    if clash.aspect != "reduce-op":
        group.is_apart = True
        group.slots.clear()
    elif len(group.told) < MAX_GROUPS:
        places = sorted(each.line.place if each.line is not None else "" for each in by_rank.values())
        if (places[0], places[-1]) in group.told:
            return []
        group.told.add((places[0], places[-1]))
    return [Disagreement(group=entry.group, seq=seq, clash=clash, by_rank=by_rank)]
