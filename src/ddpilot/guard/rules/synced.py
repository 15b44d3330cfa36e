# SPDX-License-Identifier: Apache-2.0
"""DDP505: gradients of several micro-batches are accumulated, and each of their backwards is reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.rule import line_of, place_of
from ddpilot.guard.rules.waiting import WaitingRule
from ddpilot.record.journal import Entry

_UNITS = ("B", "kB", "MB", "GB")


class AccumulationSynced(WaitingRule):
    """Reports models whose first steps accumulate with every backward reduced, as noted by a probe."""

    codes: tuple[str, ...] = ("DDP505",)
    kinds: tuple[str, ...] = ("synced",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        self._waiting.put(line_of(entry.values["site"]), rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        least, most, num_bytes = values["least"], values["most"], values["num_bytes"]
        num = str(most) if least == most else f"{least} to {most}"
        return make_finding(
            "DDP505",
            summary=f"each update exchanges its gradients {num} times: {_say(most * num_bytes)} instead of "
            f"{_say(num_bytes)}",
            ranks=tuple(by_rank),
            line=place_of(values["site"]),
            evidence=(
                f"{num} backwards add up to each step, and DDP all-reduces after each of them",
                f"gradients of the model: {_say(num_bytes)}",
            ),
            why="DDP all-reduces in every backward, unless forward and backward run inside `no_sync()`; the sum that "
            "the step takes is the same where only the last one is reduced",
            fix="Run forward and backward of all but the last micro-batch before a step in `with model.no_sync():`",
        )


def _say(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}"
