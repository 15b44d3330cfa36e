# SPDX-License-Identifier: Apache-2.0
"""Values that describe where the control flow of two sets of ranks splits, and what decided it."""

from __future__ import annotations

from dataclasses import dataclass

from ddpilot.source.control_flow import Spot
from ddpilot.watch.snapshot.model import Frame
from ddpilot.watch.snapshot.stacks import Chain


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks with the same control flow."""

    ranks: tuple[int, ...]
    chain: Chain
    """Empty if the ranks have reached the end of the program."""
    lines: frozenset[tuple[str, int]] = frozenset()
    """(file, line) of their earlier collectives in the same group, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where and why `ranks` took a different path than the others. Only fields of reasons that apply are set."""

    ranks: tuple[int, ...]
    file: str
    """The file that contains all spots."""
    guard: Spot | None = None
    """A condition that only `ranks` have passed."""
    at: Frame | None = None
    """The line behind the guard, or the line in the loop's body where the others are."""
    loop: Spot | None = None
    """A loop that `ranks` have left while the others are in it."""
    swallower: Spot | None = None
    """A handler in that loop that continues after an error, around the line where the others are."""
    skip: Spot | None = None
    """Where an iteration of that loop may be cut short."""
    exit: Spot | None = None
    """Where that loop may be left early; the loop itself if its condition may end it."""
    data_end: Spot | None = None
    """Where that loop is left when the data is exhausted."""
    handler: Spot | None = None
    """An `except`, `finally` or end of a `with` that `ranks` are in while the others are in the body before it."""
    left: Spot | None = None
    """Where `ranks` may have left a function that the others are in."""
    unsynced: Spot | None = None
    """In that loop, a `no_sync` block that applies to some iterations only."""
    same_rounds: bool = False
    """True if that loop has the same number of iterations on all ranks unless it is left early."""
    is_endless: bool = False
    """True if that loop ends only when it is left."""
    are_siblings: bool = False
    """True if the others are in the other branch of the guard."""
    same_loop: bool = False
    """True if all ranks are still in the loop, in different iterations or at different lines."""
    outer: Parting | None = None
    """If nothing explains the end of that loop: a loop around the call that it is in, which may be left early."""
    swallowed: Parting | None = None
    """A handler that continues after an error, in a function called from that loop, around where the others are."""
