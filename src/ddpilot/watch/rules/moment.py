# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as several ranks took it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpilot.record.journal import Entry
from ddpilot.watch.rules.fingerprints import Difference

When = tuple[int, int]
"""The number of collectives that the group had started, and the how manieth step since the last of them."""


@dataclass
class Moment:
    """One optimizer step, by the ranks that took it."""

    steps: dict[int, Entry] = field(default_factory=dict)
    units: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each of them said of its parameters last before: it may say something else for a later step."""
    is_compared: bool = False
    arrived_ns: int = 0
    """When the newest fingerprint came from its device, after its step had been noted; 0 where none did."""
    difference: Difference = field(default_factory=Difference)

    def value(self, rank: int, name: str) -> Any:
        """What `rank` noted as `name`; None where it did not."""
        return self.steps[rank].values.get(name)

    @property
    def begun_ns(self) -> int:
        """When the first of them took it."""
        return min(step.time_ns for step in self.steps.values())

    @property
    def number(self) -> int:
        """Of the step."""
        return min(int(step.values["n"]) for step in self.steps.values())

    @property
    def is_seen(self) -> bool:
        """Whether all gradients and parameters were looked at, on every rank."""
        return all("f" in step.values for step in self.steps.values())

    @property
    def rates(self) -> dict[int, list[float]]:
        """The ranks' learning rates, where they differ; else empty."""
        rates = {rank: step.values["lr"] for rank, step in sorted(self.steps.items()) if step.values.get("lr")}
        return rates if len({tuple(each) for each in rates.values()}) > 1 else {}

    @property
    def is_reduced(self) -> bool:
        """Whether DDP reduced a backward before this step."""
        return any("F" in (step.values.get("e") or "") for step in self.steps.values())
