# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one collective have to agree about: its op, dtypes, sizes, root and reduce-op. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ddpilot.record.exchange import EXCHANGES, find_unequal
from ddpilot.record.log import Collective, Tensor

Aspect = Literal["op", "dtype", "size", "root", "shape", "reduce-op"]
SILENT: frozenset[Aspect] = frozenset({"shape", "reduce-op"})
"""What ranks may differ in and go on, with wrong numbers."""

REDUCING = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        "reduce_scatter_tensor_coalesced",
    }
)
"""The ops whose reduce-op is part of the record, some time after the rest of it."""

# Whose sizes are the same on all ranks; of the others each rank may give or take another number.
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


@dataclass(frozen=True, slots=True)
class Clash:
    """What ranks in one collective do not agree about."""

    aspect: Aspect
    said: tuple[tuple[str, tuple[int, ...]], ...]
    """Each value in words with the ranks that gave it, the largest set of ranks first."""


def find_clash(by_rank: Mapping[int, Collective]) -> Clash | None:
    """The first thing, in the order of `Aspect`, about which the collectives of several ranks differ; else None.

    What is not known of a rank (its reduce-op is read up to 50 ms later) agrees with anything.
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
        said: dict[Hashable, list[int]] = {}
        for rank, entry in sorted(by_rank.items()):
            value = value_of(entry)
            if value is not None:
                said.setdefault(value, []).append(rank)
        if len(said) > 1 and (aspect != "shape" or _is_turned(said)):
            by_size = sorted(said.items(), key=lambda item: (-len(item[1]), item[1][0]))
            return Clash(aspect, tuple((_say(aspect, value), tuple(ranks)) for value, ranks in by_size))
    return _find_unequal_parts(by_rank)


def _find_unequal_parts(by_rank: Mapping[int, Collective]) -> Clash | None:
    is_exchange = any(entry.op in EXCHANGES for entry in by_rank.values())
    unequal = find_unequal(by_rank) if is_exchange else None
    if unequal is None:
        return None
    giver, given, taker, expected = unequal
    gives, takes = f"{given:,} elements for rank {taker}", f"{expected:,} elements from rank {giver}"
    return Clash("size", ((gives, (giver,)), (takes, (taker,))))


def terms_of(entry: Collective) -> Hashable:
    """What of a collective's op and tensors has to be the same on all ranks; equal for two that cannot clash there."""
    return entry.op, _dtypes(entry), _sizes(entry), _dims(entry)


def _dtypes(entry: Collective) -> Hashable:
    tensors = entry.inputs or entry.outputs
    return tuple(sorted({tensor.dtype for tensor in tensors})) if tensors and entry.op not in _ANY_DTYPE else None


def _sizes(entry: Collective) -> Hashable:
    if entry.op in _SAME_INPUTS or (entry.op == "all_gather" and _expects_equal(entry)):
        return tuple(map(_size, entry.inputs))
    return tuple(map(_size, entry.outputs)) if entry.op in _SAME_OUTPUTS else None


def _expects_equal(entry: Collective) -> bool:
    """Whether the rank has room for as much from every rank as it gives; NCCL also takes what differs, by name."""
    return bool(entry.inputs) and {_size(tensor) for tensor in entry.outputs} == {_size(entry.inputs[0])}


def _size(tensor: Tensor) -> int:
    return prod(tensor.shape)


def _dims(entry: Collective) -> Hashable:
    """The shape of a single tensor without dimensions of one; None where it has less than two: flat fits any."""
    if entry.op not in _SAME_INPUTS or len(entry.inputs) != 1:
        return None
    dims = tuple(size for size in entry.inputs[0].shape if size != 1)
    return dims if len(dims) > 1 else None


def _is_turned(said: Mapping[Hashable, object]) -> bool:
    """Whether one has the dimensions of another in another order; views such as [2, 6] and [4, 3] may be meant."""
    return len({tuple(sorted(dims)) for dims in said if isinstance(dims, tuple)}) < len(said)


def _say(aspect: Aspect, value: Hashable) -> str:
    if aspect == "root":
        return f"root {value}"
    if not isinstance(value, tuple):
        return str(value)
    if aspect == "shape":
        return str(list(value))
    text = ", ".join(f"{part:,}" if isinstance(part, int) else str(part) for part in value[:4])
    more = f" and {len(value) - 4} more" if len(value) > 4 else ""
    return f"{text}{more} elements" if aspect == "size" else f"{text}{more}"
