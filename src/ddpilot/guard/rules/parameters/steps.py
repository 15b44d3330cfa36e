# SPDX-License-Identifier: Apache-2.0
"""Match the optimizer steps of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ddpilot.guard.notes import Fingerprint, ParameterSetNote, StepNote
from ddpilot.guard.rules.parameters.fingerprint_comparison import Difference
from ddpilot.guard.rules.rule import BoundedDict
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
    """When the newest fingerprint arrived from its device, after its step was noted; 0 if none did."""
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
        """When the first of the ranks took the step."""
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
    def settings(self) -> dict[int, dict[str, str]]:
        """By rank, the optimizer's settings that differ between ranks, or only its class; empty if none do."""
        of_rank = {rank: note["settings"] for rank, note in sorted(self.sets.items())}
        first = next(iter(of_rank.values()), {})
        differing = [name for name in first if len({settings.get(name) for settings in of_rank.values()}) > 1]
        if differing[:1] == ["optimizer"]:
            del differing[1:]
        shown = {rank: {name: settings.get(name, "none") for name in differing} for rank, settings in of_rank.items()}
        return shown if differing else {}

    @property
    def is_reduced(self) -> bool:
        """True if DDP reduced a backward before this step."""
        return any("F" in note["events"] for note in self.notes.values())


MAX_STEPS = 128
"""Number of the newest steps that are kept."""

WAIT_NS = 300_000_000
"""How long to wait for ranks that have not noted a step yet before those that have are compared."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that some ranks took and others did not."""

    number: int
    """The number of the step."""
    taken_by: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks that did not take it."""


class MatchedSteps:
    """The newest steps of every rank with one parameter set, each identified by its `StepKey`."""

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        """When each rank took its first step."""
        self.num_of: dict[int, int] = {}
        """Number of steps that each rank took."""
        self.newest = 0
        """The highest step number."""
        self._newest_of: dict[int, StepKey] = {}
        self._steps: BoundedDict[StepKey, MatchedStep] = BoundedDict(MAX_STEPS)
        self._waiting: BoundedDict[StepKey, MatchedStep] = BoundedDict(MAX_STEPS)
        self._expected: BoundedDict[tuple[int, int], MatchedStep] = BoundedDict(MAX_STEPS)

    def __iter__(self) -> Iterator[MatchedStep]:
        return iter(self._steps.values())

    def add(self, rank: int, entry: Entry, parameters: ParameterSetNote) -> None:
        """Add a step that `rank` is about to take."""
        note: StepNote = entry.values
        seq, number = note["seq"], note["step"]
        last_seq, last_count = self._newest_of.get(rank, (-1, 0))
        self._newest_of[rank] = key = (seq, last_count + 1 if last_seq == seq else 0)
        self.first_ns.setdefault(rank, entry.time_ns)
        self.num_of[rank] = self.num_of.get(rank, 0) + 1
        self.newest = max(self.newest, number)
        matched = self._steps.setdefault(key, MatchedStep())
        matched.steps[rank] = entry
        matched.sets[rank] = parameters
        if not matched.is_compared and ("fingerprint" in note or "is_copying" in note):
            self._waiting[key] = matched
        if "is_copying" in note:
            self._expected[rank, number] = matched

    def arrived(self, rank: int, entry: Entry) -> None:
        """Add the fingerprint of a step of `rank` that has been copied from its device."""
        matched = self._expected.pop((rank, entry.values["step"]), None)
        if matched is not None and not matched.is_compared:
            step = matched.steps[rank]
            matched.steps[rank] = replace(step, values={**step.values, "fingerprint": entry.values["fingerprint"]})
            matched.arrived_ns = entry.time_ns

    def take_ready(self, num_ranks: int, now_ns: int | None) -> list[MatchedStep]:
        """Return the steps that can be compared, oldest first, each once: all ranks, or two after `WAIT_NS`, noted it.

        `now_ns`: None to return only steps that all ranks have noted.
        """
        ready = []
        for key, matched in list(self._waiting.items()):
            num = len(matched.fingerprints)
            is_old = now_ns is not None and now_ns - max(matched.begun_ns, matched.arrived_ns) >= WAIT_NS
            if num >= num_ranks or (num >= 2 and is_old):
                matched.is_compared = True
                ready.append(matched)
                del self._waiting[key]
        return ready

    def newest_of(self, rank: int) -> MatchedStep | None:
        """Return the newest step of `rank`; None if it took none."""
        return self._steps.get(self._newest_of.get(rank, (-1, 0)))

    def previous_ns(self, rank: int, at_ns: int) -> int | None:
        """Return when `rank` took the last step before `at_ns`; None if there is none."""
        times = (matched.steps[rank].time_ns for matched in self if rank in matched.steps)
        return max((time_ns for time_ns in times if time_ns < at_ns), default=None)

    def find_skipped(self) -> Skipped | None:
        """Return the first step that a rank skipped, in the range that all ranks cover; None if there is none."""
        taken = {rank: [key for key, matched in self._steps.items() if rank in matched.steps] for rank in self.num_of}
        begun = max((min(keys) for keys in taken.values() if keys), default=(0, 0))
        ended = min((max(keys) for keys in taken.values() if keys), default=(0, 0))
        for key, matched in sorted(self._steps.items(), key=lambda item: item[0]):
            ranks = tuple(rank for rank, keys in taken.items() if keys and rank not in matched.steps)
            if ranks and begun <= key <= ended:
                return Skipped(matched.number, tuple(matched.steps), ranks)
        return None

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self._waiting.clear()
        self._expected.clear()
