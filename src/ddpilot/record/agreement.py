# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one collective have to agree about: its op, dtypes, sizes, root and reduce-op. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from ddpilot.record.log import Collective, Tensor

Aspect = Literal["op", "dtype", "size", "root", "reduce-op"]

# Whose sizes are the same on all ranks; of the others each rank may give or take another number.
_SAME_INPUTS = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather_into_tensor",
        "broadcast",
        "gather",
        "reduce",
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
        ("reduce-op", lambda entry: entry.reduce_op),
    )
    for aspect, value_of in aspects:
        said: dict[Hashable, list[int]] = {}
        for rank, entry in sorted(by_rank.items()):
            value = value_of(entry)
            if value is not None:
                said.setdefault(value, []).append(rank)
        if len(said) > 1:
            by_size = sorted(said.items(), key=lambda item: (-len(item[1]), item[1][0]))
            return Clash(aspect, tuple((_say(aspect, value), tuple(ranks)) for value, ranks in by_size))
    return None


def terms_of(entry: Collective) -> Hashable:
    """What of a collective's op and tensors has to be the same on all ranks; equal for two that cannot clash there."""
    return entry.op, _dtypes(entry), _sizes(entry)


def _dtypes(entry: Collective) -> Hashable:
    tensors = entry.inputs or entry.outputs
    return tuple(sorted({tensor.dtype for tensor in tensors})) if tensors and entry.op not in _ANY_DTYPE else None


def _sizes(entry: Collective) -> Hashable:
    if entry.op in _SAME_INPUTS:
        return tuple(map(_size, entry.inputs))
    return tuple(map(_size, entry.outputs)) if entry.op in _SAME_OUTPUTS else None


def _size(tensor: Tensor) -> int:
    # [2, 3] and [3, 2] meet without harm: DDP itself sends flat buckets.
    return prod(tensor.shape)


def _say(aspect: Aspect, value: Hashable) -> str:
    if aspect == "root":
        return f"root {value}"
    if not isinstance(value, tuple):
        return str(value)
    text = ", ".join(f"{part:,}" if isinstance(part, int) else str(part) for part in value[:4])
    more = f" and {len(value) - 4} more" if len(value) > 4 else ""
    return f"{text}{more} elements" if aspect == "size" else f"{text}{more}"
