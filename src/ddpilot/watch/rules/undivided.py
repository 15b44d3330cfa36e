# SPDX-License-Identifier: Apache-2.0
"""DDP333: mean losses of several micro-batches are accumulated, and nothing divides by their number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.watch.rules.gathering import Gathering
from ddpilot.watch.rules.rule import RuleContext, line_of, place_of
from ddpilot.watch.rules.waiting import WaitingRule

NUM_GROUPS = 16
"""Number of steps before the warning; until then the probe may retract it."""


class Undivided(WaitingRule):
    """Reports what a probe noted: after 16 steps, or at the end if the probe has not retracted it."""

    codes: tuple[str, ...] = ("DDP333",)
    kinds: tuple[str, ...] = ("undivided",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._early: Gathering[tuple[str, int], Entry] = Gathering()

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        key = line_of(entry.values["site"])
        if not entry.values["groups"]:
            self._early.pop(key)
            self._waiting.drop(key)
        elif entry.values["groups"] < NUM_GROUPS:
            self._early.put(key, rank, entry)
        else:
            self._early.pop(key)
            self._waiting.put(key, rank, entry.values, entry.time_ns)
        return ()

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """See `Rule.finish`."""
        for key in tuple(self._early):
            for rank, entry in self._early.pop(key).items():
                self._waiting.put(key, rank, entry.values, entry.time_ns)
        return super().finish(now_ns)

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        values = next(iter(by_rank.values()))
        num, is_scaled = values["num"], values["is_scaled"]
        but, then = (", but a scale, as a GradScaler does", ", divided by that scale") if is_scaled else ("", "")
        divided = f"scaler.scale(loss / {num})" if is_scaled else f"(loss / {num})"
        return Finding(
            code=self.codes[0],
            name="accumulation-undivided",
            severity="warning",
            summary=f"each step adds up the gradients of {num} mean losses, and nothing divides by {num}",
            ranks=tuple(by_rank),
            place=place_of(values["site"]),
            evidence=(
                f"before each of {values['groups']} steps: {num} forwards and backwards, all but the last in no_sync",
                f"backward begins at {values['loss']}, a mean, which nothing multiplies or divides{but}",
                f"gradients are the same after the last backward and at {place_of(values['step'])}{then}",
            ),
            why=f"gradients add up: the sum is {num} times the gradient of the mean over all {num} micro-batches, so "
            "that a step is as much longer than the learning rate says",
            fix=f"Divide each loss: {divided}.backward(). If a long step is meant, or the learning rate is lower "
            "for it, nothing is wrong: then write the division there, lr=... / n, and nothing is said",
            source="ddpilot explain DDP333",
        )
