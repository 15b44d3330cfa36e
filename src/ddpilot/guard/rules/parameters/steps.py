# SPDX-License-Identifier: Apache-2.0
"""Match the optimizer steps and passes of several ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from ddpilot.guard.notes import Fingerprint, ParameterSetNote, StepNote
from ddpilot.guard.rules.parameters.fingerprint_comparison import Difference
from ddpilot.record.journal import Entry

StepKey = tuple[int, int]
"""(collectives the group had started, optimizer steps since the last of them)"""


@dataclass
class MatchedStep:
    """One optimizer step, by the ranks that took it."""

    steps: dict[int, Entry] = field(default_factory=dict)
    sets: dict[int, ParameterSetNote] = field(default_factory=dict)
    """What each rank last noted about its parameters before the step; it may differ for a later step."""
    is_compared: bool = False
    arrived_ns: int = 0
    """StepKey the newest fingerprint arrived from its device, after its step was noted; 0 if none did."""
    difference: Difference = field(default_factory=Difference)

    @property
    def notes(self) -> dict[int, StepNote]:
        """What the ranks noted on the step."""
        return {rank: step.values for rank, step in self.steps.items()}

    @property
    def fingerprints(self) -> dict[int, Fingerprint]:
        """The fingerprints that have arrived, by rank."""
        return {rank: note["fingerprint"] for rank, note in self.notes.items() if "fingerprint" in note}

    @property
    def begun_ns(self) -> int:
        """StepKey the first of the ranks took the step."""
        return min(step.time_ns for step in self.steps.values())

    @property
    def number(self) -> int:
        """The number of the step."""
        return min(note["step"] for note in self.notes.values())

    @property
    def is_seen(self) -> bool:
        """True if all gradients and parameters were examined, on every rank."""
        return len(self.fingerprints) == len(self.steps)

    @property
    def rates(self) -> dict[int, list[float]]:
        """The ranks' learning rates if they differ; empty otherwise."""
        rates = {rank: note["rates"] for rank, note in sorted(self.notes.items()) if note.get("rates")}
        return rates if len({tuple(each) for each in rates.values()}) > 1 else {}

    @property
    def is_reduced(self) -> bool:
        """True if DDP reduced a backward before this step."""
        return any("F" in note["events"] for note in self.notes.values())


MAX_STEPS = 128
"""Number of each rank's newest steps that are kept."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that some ranks took and others did not."""

    number: int
    """The number of the step."""
    taken_by: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks that did not take it."""


class StepsTaken:
    """The newest steps of every rank with one parameter set, each identified by its `StepKey`."""

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        """StepKey each rank took its first step."""
        self.newest = 0
        """The highest step number."""
        self._last: dict[int, StepKey] = {}
        self._order: dict[int, deque[tuple[StepKey, int]]] = {}

    @property
    def ranks(self) -> Set[int]:
        """The ranks that took a step."""
        return self._order.keys()

    def add(self, rank: int, entry: Entry) -> StepKey:
        """Add a step that `rank` is about to take, and return its `StepKey`."""
        note: StepNote = entry.values
        seq, number = note["seq"], note["step"]
        last = self.newest_of(rank)
        self._last[rank] = key = (seq, last[1] + 1 if last[0] == seq else 0)
        self._order.setdefault(rank, deque(maxlen=MAX_STEPS)).append((key, number))
        self.first_ns.setdefault(rank, entry.time_ns)
        self.newest = max(self.newest, number)
        return key

    def newest_of(self, rank: int) -> StepKey:
        """Return the `StepKey` of the newest step of `rank`."""
        return self._last.get(rank, (-1, 0))

    def find_skipped(self) -> Skipped | None:
        """Return the first step that a rank skipped, in the range that all ranks cover; None if there is none."""
        begun = max((order[0] for order in self._order.values()), default=((0, 0), 0))[0]
        ended = min((order[-1] for order in self._order.values()), default=((0, 0), 0))[0]
        taken = {rank: dict(order) for rank, order in self._order.items()}
        for key in sorted(set().union(*taken.values())):
            ranks = tuple(rank for rank in taken if key not in taken[rank])
            if ranks and begun <= key <= ended:
                counts = {rank: steps[key] for rank, steps in taken.items() if key in steps}
                return Skipped(min(counts.values()), tuple(counts), ranks)
        return None

    def clear(self) -> None:
        """Forget the order, once it is no longer needed."""
        self._order.clear()


_MAX_PASSES = 64


class PassesBegun:
    """The newest passes over loaders, for one optimizer on several ranks."""

    def __init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self._begun: dict[tuple[int, int], dict[int, int]] = {}

    def step(self, rank: int) -> None:
        """Count a step of `rank`."""
        self._num_steps[rank] = self._num_steps.get(rank, 0) + 1

    def begin(self, rank: int, loader: int, number: int) -> None:
        """Note that `rank` starts pass `number` over `loader`."""
        self._begun.setdefault((loader, number), {}).setdefault(rank, self._num_steps.get(rank, 0))
        if len(self._begun) > _MAX_PASSES:
            self._begun.pop(next(iter(self._begun)))

    def find_uneven(self, since: int) -> dict[int, int]:
        """Return by rank the number of steps before the first pass that did not begin at the same step on all ranks.

        Ignores passes that all began before step `since`; empty if there is none.
        """
        uneven = (begun for begun in self._begun.values() if len({*begun.values()}) > 1)
        return next((begun for begun in uneven if max(begun.values()) >= since), {})
