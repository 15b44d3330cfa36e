# SPDX-License-Identifier: Apache-2.0
"""DDP408 and DDP409: BatchNorm statistics from small parts of a batch, and weights that became NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import RuleContext, WaitingRule, place_of, some
from ddpilot.record.journal import Entry


class NotFinite(WaitingRule):
    """Reports where non-finite values began, once an optimizer step has written them into finite weights.

    A non-finite loss or gradient alone is not an error: a scaler, or the program, may skip that step.
    """

    codes: tuple[str, ...] = ("DDP409",)
    kinds: tuple[str, ...] = ("not_finite", "spoiled")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._seen: dict[int, dict[int, Any]] = {}
        self._num_noted: dict[int, int] = {}
        self._num_found = 0

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        if entry.kind == "not_finite":
            mine = self._seen.setdefault(rank, {})
            mine[entry.values["backward"]] = entry.values
            if len(mine) > 64:
                mine.pop(min(mine))
        else:
            # A rank may have missed an earlier one: it need not have gone on until its own loss was not finite.
            number = max(self._num_noted.get(rank, 0), self._num_found)
            self._num_noted[rank] = number + 1
            self._waiting.put(number, rank, {**entry.values, "number": number}, entry.time_ns)
        return ()

    def _finding(self, spoiled: dict[int, Any]) -> Finding:
        self._num_found = max(self._num_found, 1 + next(iter(spoiled.values()))["number"])
        # A rank whose own loss was finite notices it only in its next backward.
        last = min(values["backward"] for values in spoiled.values())
        firsts = {rank: _begin(mine, last) for rank, mine in self._seen.items() if last in mine}
        begun = min(firsts.values(), default=last)
        culprits = {rank: self._seen[rank][begun] for rank, number in sorted(firsts.items()) if number == begun}
        first = next(iter(culprits.values()), next(iter(spoiled.values())))
        parameters = next(iter(spoiled.values()))["parameters"]
        evidence = [_describe(rank, values) for rank, values in list(culprits.items())[:8]]
        others = [rank for rank in spoiled if rank not in culprits]
        if others and culprits:
            evidence.append(f"on {render_ranks(others)} loss and gradients were finite before the ranks' were averaged")
        evidence.append(f"weights that are not finite since that step: {some(parameters)}")
        who = tuple(culprits) or tuple(spoiled)
        return make_finding(
            "DDP409",
            summary=f"weights are not finite since backward {begun}"
            + (f"; it began on {render_ranks(who)}" if culprits else ""),
            ranks=who,
            line=place_of(first.get("site")) or place_of(next(iter(spoiled.values())).get("site")),
            evidence=tuple(evidence),
            why="DDP averages gradients over all ranks: one that is not finite makes them so everywhere.",
            fix="Look at the samples of that batch, at a division, logarithm or root in the loss, then at the learning "
            "rate. torch.autograd.set_detect_anomaly(True) finds the line of a gradient.",
        )


def _begin(mine: dict[int, Any], last: int) -> int:
    """Return the first of the consecutive backwards up to `last`, which belong to one accumulated step."""
    while last - 1 in mine:
        last -= 1
    return last


def _describe(rank: int, values: Any) -> str:
    what = f"the loss was {values['loss']}" if values["loss"] else "the loss was finite, its gradient was not"
    where = f"backward {values['backward']}"
    if values.get("batch") is not None:
        where += f", batch {values['batch']} of pass {values['pass']} over the loader"
    indices = values.get("indices") or ()
    return f"rank {rank}: {what} in {where}" + (f", samples {some(indices, 8)}" if indices else "")


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
