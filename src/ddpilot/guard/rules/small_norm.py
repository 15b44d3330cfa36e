# SPDX-License-Identifier: Apache-2.0
"""DDP408: BatchNorm computes its statistics from a small part of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.gathering import some
from ddpilot.guard.rules.rule import place_of
from ddpilot.guard.rules.waiting import WaitingRule
from ddpilot.record.journal import Entry

MIN_SAMPLES = 16
"""Fewer samples per rank make the statistics noisy; from 32 on there is no effect.
`Loop` uses the same limit before an epoch (DDP501).
"""


class SmallBatchNorm(WaitingRule):
    """Reports DDP models whose first three training forwards had fewer than `MIN_SAMPLES`, as noted by a probe."""

    codes: tuple[str, ...] = ("DDP408",)
    kinds: tuple[str, ...] = ("norms",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        if max(entry.values["rows"]) < MIN_SAMPLES:
            self._waiting.put(entry.values["model"], rank, entry.values, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        first = next(iter(by_rank.values()))
        rows = sorted({row for values in by_rank.values() for row in values["rows"]})
        return make_finding(
            "DDP408",
            summary=f"BatchNorm takes its statistics from {rows[-1]} samples",
            ranks=tuple(by_rank),
            line=place_of(first.get("site")),
            evidence=(
                f"layers in training mode: {some(first['layers'])}",
                f"samples of a rank in a batch: {', '.join(map(str, rows))}",
            ),
            why="Each rank normalises with its own samples only, so results depend on the number of ranks, and "
            f"statistics of fewer than {MIN_SAMPLES} samples are noisy.",
            fix="Use GroupNorm or a larger batch; on GPUs SyncBatchNorm.convert_sync_batchnorm(model) helps too.",
        )
