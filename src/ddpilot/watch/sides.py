# SPDX-License-Identifier: Apache-2.0
"""Two sets of ranks that went different ways, and what decided that."""

from __future__ import annotations

from dataclasses import dataclass

from ddpilot.watch.control import Spot
from ddpilot.watch.stacks import Chain
from ddpilot.watch.view import Frame


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that went the same way."""

    ranks: tuple[int, ...]
    chain: Chain
    """Empty where they have come to the end of the program."""
    lines: frozenset[tuple[str, int]] = frozenset()
    """File and line of their earlier collectives in the same group, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What decided that `ranks` went another way than the others; each of the reasons only where it applies."""

    ranks: tuple[int, ...]
    file: str
    """Where all the spots are."""
    guard: Spot | None = None
    """A condition that let only `ranks` pass."""
    at: Frame | None = None
    """The line behind the guard; or the line of the loop's body where the others are."""
    loop: Spot | None = None
    """A loop that `ranks` have left while the others are in it."""
    swallower: Spot | None = None
    """A handler in that loop, around what the others are in, that goes on after an error."""
    skip: Spot | None = None
    """Where a round of that loop may be cut short."""
    exit: Spot | None = None
    """Where that loop may be left early; the loop itself, where its condition may end it."""
    data_end: Spot | None = None
    """Where that loop is left when there is no more data."""
    handler: Spot | None = None
    """Where only an error, or leaving early, leads: `ranks` are in it, the others in what it is the end of."""
    left: Spot | None = None
    """Where `ranks` may have left a function while the others are in it."""
    unsynced: Spot | None = None
    """In that loop, where DDP exchanges nothing in some rounds."""
    same_rounds: bool = False
    """That loop has as many rounds on all ranks, if it is not left."""
    is_endless: bool = False
    """That loop has no end of its own."""
    are_siblings: bool = False
    """The others are in the other branch of the guard."""
    same_loop: bool = False
    """All are still in the loop: in different rounds, or at different lines of it."""
    outer: Parting | None = None
    """Where nothing says why that loop ended: a loop around the call that it is in, which may be left early."""
    swallowed: Parting | None = None
    """A handler in what is called from that loop, around what the others are in, that goes on after an error."""
