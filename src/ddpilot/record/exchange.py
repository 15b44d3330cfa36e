# SPDX-License-Identifier: Apache-2.0
"""What ranks give each other in an all-to-all, and what they expect of each other: pair by pair. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ddpilot.record.log import Collective, Tensor

EXCHANGES = frozenset({"all_to_all", "all_to_all_single"})
MAX_RANKS = 256
"""Of more ranks the pairs are too many to look at again and again."""

Unequal = tuple[int, int, int, int]
"""A rank, how many numbers it gives to another, that rank, how many that one expects."""


def find_unequal(by_rank: Mapping[int, Collective]) -> Unequal | None:
    """The first pair of ranks of which one gives another number of elements than the other expects."""
    if len(by_rank) > MAX_RANKS:
        return None
    for giver, sent in sorted(by_rank.items()):
        for taker, received in sorted(by_rank.items()):
            given = _part(sent, sent.inputs, 1, taker)
            expected = _part(received, received.outputs, 0, giver)
            if giver != taker and None not in (given, expected) and given != expected:
                return giver, given or 0, taker, expected or 0
    return None


def _part(entry: Collective, tensors: tuple[Tensor, ...], splits_at: int, other: int) -> int | None:
    """How many elements of `tensors` are for, or of, the rank `other`; None where that is not known."""
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
