# SPDX-License-Identifier: Apache-2.0
"""Find collectives whose op, dtypes, sizes, root or reduce-op differ between the ranks of their group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ddpilot.record.flight_ring.log import Collective, Tensor
from ddpilot.watch.matching.progress import GroupCollective, GroupProgress

Aspect = Literal["op", "dtype", "size", "root", "shape", "reduce-op"]
WRONG_BUT_RUNNING: frozenset[Aspect] = frozenset({"shape", "reduce-op"})
"""Aspects in which ranks can differ without an error or a hang; the results are wrong."""


# Ops whose sizes must be equal on all ranks. In the other ops each rank may send or receive a different number of
# elements.
_SAME_INPUTS = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather_into_tensor",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
    }
)
_SAME_OUTPUTS = frozenset({"scatter"})
_ANY_DTYPE = frozenset({"barrier", "monitored_barrier"})


_Values = tuple[tuple[str, tuple[int, ...]], ...]
"""The differing values, as text, each with the ranks that passed it; the largest set of ranks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedCollective(GroupCollective):
    """A collective with different arguments on different ranks."""

    aspect: Aspect
    values: _Values

    @property
    def sides(self) -> list[tuple[int, ...]]:
        """The ranks that passed the same value, the largest set first."""
        return [ranks for _, ranks in self.values]

    @property
    def is_silent(self) -> bool:
        """True if training continues, with wrong results."""
        return self.aspect in WRONG_BUT_RUNNING


def _find_mismatch(by_rank: Mapping[int, Collective]) -> tuple[Aspect, _Values] | None:
    """Return the first aspect, in the order of `Aspect`, in which the collectives differ; None if all ranks agree.

    An unknown value agrees with any other: a reduce-op is read up to 50 ms after the collective starts.
    """
    aspects: Sequence[tuple[Aspect, Callable[[Collective], Hashable]]] = (
        ("op", lambda entry: entry.op),
        ("dtype", _dtypes),
        ("size", _sizes),
        ("root", lambda entry: entry.root),
        ("shape", _dims),
        ("reduce-op", lambda entry: entry.reduce_op),
    )
    for aspect, value_of in aspects:
        by_value: dict[Hashable, list[int]] = {}
        for rank, entry in sorted(by_rank.items()):
            value = value_of(entry)
            if value is not None:
                by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1 and (aspect != "shape" or _is_permuted(by_value)):
            by_size = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1][0]))
            return aspect, tuple((_render(aspect, value), tuple(ranks)) for value, ranks in by_size)
    is_exchange = any(entry.op in EXCHANGES for entry in by_rank.values())
    return _find_unequal_parts(by_rank) if is_exchange else None


def signature_of(entry: Collective) -> Hashable:
    """Return the op and the attributes of tensors that must be equal on all ranks."""
    return entry.op, _dtypes(entry), _sizes(entry), _dims(entry)


def _dtypes(entry: Collective) -> Hashable:
    tensors = entry.inputs or entry.outputs
    return tuple(sorted({tensor.dtype for tensor in tensors})) if tensors and entry.op not in _ANY_DTYPE else None


def _sizes(entry: Collective) -> Hashable:
    if entry.op in _SAME_INPUTS or (entry.op == "all_gather" and _expects_equal(entry)):
        return tuple(map(_size, entry.inputs))
    return tuple(map(_size, entry.outputs)) if entry.op in _SAME_OUTPUTS else None


def _expects_equal(entry: Collective) -> bool:
    """True if the rank expects as much from every rank as it sends. NCCL accepts unequal sizes too, as the same op."""
    return bool(entry.inputs) and {_size(tensor) for tensor in entry.outputs} == {_size(entry.inputs[0])}


def _size(tensor: Tensor) -> int:
    return prod(tensor.shape)


def _dims(entry: Collective) -> Hashable:
    """The shape of the only tensor without dimensions of size 1; None if fewer than 2 remain: flat tensors fit any."""
    if entry.op not in _SAME_INPUTS or len(entry.inputs) != 1:
        return None
    dims = tuple(size for size in entry.inputs[0].shape if size != 1)
    return dims if len(dims) > 1 else None


def _is_permuted(shapes: Collection[Hashable]) -> bool:
    """True if one shape is a permutation of a different one. Reshaping, as to [2, 6] and [4, 3], may be intended."""
    return len({tuple(sorted(dims)) for dims in shapes if isinstance(dims, tuple)}) < len(shapes)


def _render(aspect: Aspect, value: Hashable) -> str:
    if aspect == "root":
        return f"root {value}"
    if not isinstance(value, tuple):
        return str(value)
    if aspect == "shape":
        return str(list(value))
    text = ", ".join(f"{part:,}" if isinstance(part, int) else str(part) for part in value[:4])
    more = f" and {len(value) - 4} more" if len(value) > 4 else ""
    unit = "element" if value == (1,) else "elements"
    return f"{text}{more} {unit}" if aspect == "size" else f"{text}{more}"


EXCHANGES = frozenset({"all_to_all", "all_to_all_single"})
_MAX_RANKS = 256
"""Larger groups are not compared: they have too many pairs to check repeatedly."""


def _find_unequal_parts(by_rank: Mapping[int, Collective]) -> tuple[Aspect, _Values] | None:
    """Return the first pair of ranks of which one sends a different number of elements than the other expects."""
    if len(by_rank) > _MAX_RANKS:
        return None
    for giver, sent in sorted(by_rank.items()):
        for taker, received in sorted(by_rank.items()):
            given = _part(sent, sent.inputs, 1, taker)
            expected = _part(received, received.outputs, 0, giver)
            if giver != taker and None not in (given, expected) and given != expected:
                gives, takes = f"{given:,} elements for rank {taker}", f"{expected:,} elements from rank {giver}"
                return "size", ((gives, (giver,)), (takes, (taker,)))
    return None


def _part(entry: Collective, tensors: tuple[Tensor, ...], splits_at: int, other: int) -> int | None:
    """Number of elements of `tensors` that are sent to, or received from, rank `other`; None if not known."""
    group = entry.group
    if group is None or other not in group.ranks or not tensors:
        return None
    place = group.ranks.index(other)
    if entry.op == "all_to_all":
        return prod(tensors[place].shape) if place < len(tensors) else None
    shape = tensors[0].shape
    splits = entry.splits[splits_at] if len(entry.splits) > splits_at else ()
    if splits:
        return splits[place] * prod(shape[1:]) if place < len(splits) else None
    return prod(shape) // len(group.ranks)


def find_first_mismatches(progress: GroupProgress) -> list[MismatchedCollective]:
    """Return the first mismatches of a group: at most one that does not stop training, and at most one that does."""
    terms: dict[tuple[int, int, str], object] = {}
    same: dict[object, object] = {}  # equal terms are one object, so that ranks are compared by identity
    first = progress.first_common
    by_seq: dict[int, dict[int, Collective]] = {}
    first_seen: dict[int, tuple[object, int | None, str | None]] = {}
    odd: set[int] = set()
    for rank, entries in progress.by_rank.items():
        for entry in entries:
            seq = entry.seq
            if seq is None or seq < first:
                continue
            key = (id(entry.inputs), id(entry.outputs), entry.op)
            mine = terms.get(key)
            if mine is None:
                mine = signature_of(entry)
                mine = terms[key] = same.setdefault(mine, mine)
            here = by_seq.get(seq)
            if here is None:
                by_seq[seq] = {rank: entry}
                first_seen[seq] = mine, entry.root, entry.reduce_op
                continue
            if first_seen[seq] != (mine, entry.root, entry.reduce_op):
                odd.add(seq)
            here[rank] = entry
    # Exchanges of point-to-point parts are compared only where the ranks are now: comparing all of them takes too long.
    newest = max(map(progress.position, progress.by_rank))
    odd |= {seq for seq in (newest - 1, newest) if any(each.op in EXCHANGES for each in by_seq.get(seq, {}).values())}
    found: dict[bool, MismatchedCollective] = {}
    for seq in sorted(odd):
        mismatch = _find_mismatch(by_seq[seq])
        if mismatch is not None:
            aspect, values = mismatch
            each = MismatchedCollective(progress=progress, seq=seq, by_rank=by_seq[seq], aspect=aspect, values=values)
            found.setdefault(each.is_silent, each)
        if False in found:
            break
    return list(found.values())
