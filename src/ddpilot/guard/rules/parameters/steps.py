# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as several ranks took it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpilot.guard.rules.parameters.fingerprints import Difference
from ddpilot.record.journal import Entry

When = tuple[int, int]
"""(collectives the group had started, optimizer steps since the last of them)"""


@dataclass
class Moment:
    """One optimizer step, by the ranks that took it."""

    steps: dict[int, Entry] = field(default_factory=dict)
    units: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each rank last noted about its parameters before the step; it may differ for a later step."""
    is_compared: bool = False
    arrived_ns: int = 0
    """When the newest fingerprint arrived from its device, after its step was noted; 0 if none did."""
    difference: Difference = field(default_factory=Difference)

    def value(self, rank: int, name: str) -> Any:
        """Return the value that `rank` noted as `name`; None if it did not."""
        return self.steps[rank].values.get(name)

    @property
    def begun_ns(self) -> int:
        """When the first of the ranks took the step."""
        return min(step.time_ns for step in self.steps.values())

    @property
    def number(self) -> int:
        """The number of the step."""
        return min(int(step.values["n"]) for step in self.steps.values())

    @property
    def is_seen(self) -> bool:
        """True if all gradients and parameters were examined, on every rank."""
        return all("f" in step.values for step in self.steps.values())

    @property
    def rates(self) -> dict[int, list[float]]:
        """The ranks' learning rates if they differ; empty otherwise."""
        rates = {rank: step.values["lr"] for rank, step in sorted(self.steps.items()) if step.values.get("lr")}
        return rates if len({tuple(each) for each in rates.values()}) > 1 else {}

    @property
    def is_reduced(self) -> bool:
        """True if DDP reduced a backward before this step."""
        return any("F" in (step.values.get("e") or "") for step in self.steps.values())
