# SPDX-License-Identifier: Apache-2.0
"""Compare, for each pair of ranks, what one sends in all_to_all with what the other expects. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ddpilot.record.flight_ring.log import Collective, Tensor

EXCHANGES = frozenset({"all_to_all", "all_to_all_single"})
MAX_RANKS = 256
"""Larger groups are not compared: they have too many pairs to check repeatedly."""

Unequal = tuple[int, int, int, int]
"""The sending rank, number of elements sent, the receiving rank, number of elements expected."""


def find_unequal(by_rank: Mapping[int, Collective]) -> Unequal | None:
    """Return the first pair of ranks of which one sends a different number of elements than the other expects."""
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
