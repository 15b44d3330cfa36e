# SPDX-License-Identifier: Apache-2.0
"""DDP408: BatchNorm takes its statistics from a small part of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.watch.rules.gathering import PATIENCE_NS, Waiting, some
from ddpilot.watch.rules.rule import RuleContext, place_of

MIN_SAMPLES = 16
"""A rank's part of a batch below this makes the statistics noisy; from 32 on it makes no difference. What a `Loop` says
before an epoch (DDP501) has the same limit."""


class SmallBatchNorm:
    """Says what a probe noted of a DDP model whose first three forwards in training had that few samples."""

    codes: tuple[str, ...] = ("DDP408",)
    kinds: tuple[str, ...] = ("norms",)

    def __init__(self, context: RuleContext) -> None:
        self._waiting: Waiting[int, Any] = Waiting(context.world_size)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """What `rank` noted."""
        if max(entry.values["rows"]) < MIN_SAMPLES:
            self._waiting.put(entry.values["model"], rank, entry.values, entry.time_ns)
        return ()

    def look(self, now_ns: int) -> Iterable[Finding]:
        """What can be said now."""
        for _, by_rank in self._waiting.ready(now_ns):
            first = next(iter(by_rank.values()))
            rows = sorted({row for values in by_rank.values() for row in values["rows"]})
            yield Finding(
                code=self.codes[0],
                name="batch-norm-unsynced",
                severity="warning",
                summary=f"BatchNorm takes its statistics from {rows[-1]} samples",
                ranks=tuple(by_rank),
                place=place_of(first.get("site")),
                evidence=(
                    f"layers in training mode: {some(first['layers'])}",
                    f"samples of a rank in a batch: {', '.join(map(str, rows))}",
                ),
                why="Each rank normalises with its own samples only, so results depend on the number of ranks, and "
                f"statistics of fewer than {MIN_SAMPLES} samples are noisy.",
                fix="Use GroupNorm, a larger batch, or SyncBatchNorm.convert_sync_batchnorm(model) on GPUs.",
                source="ddpilot explain DDP408",
            )

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """What waits is said now."""
        return self.look(now_ns + PATIENCE_NS)
