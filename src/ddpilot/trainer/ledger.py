# SPDX-License-Identifier: Apache-2.0
"""The losses of an epoch: kept without waiting for the device, added up over the ranks once, at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from ddpilot.trainer.batches import with_count
from ddpilot.trainer.history import thin
from ddpilot.training.loop import Loop

_FLUSH = 256
_MAX_ROWS = 1000


class Ledger:
    """Sums of losses, weighted by what they are means over, for each update of one epoch.

    `before`: what `state_dict` gave, of an epoch that goes on from a checkpoint in its middle.
    """

    def __init__(self, loop: Loop, before: Mapping[str, Any] | None = None) -> None:
        self._loop = loop
        self._before = before
        self._began_s = time.perf_counter()
        self._names: tuple[str, ...] = ("loss",)
        self._waiting: list[tuple[torch.Tensor, ...]] = []
        self._weights: list[float] = []
        self._ends: list[bool] = []
        self._updates: list[list[float]] = []
        """For each update the sums of this rank's losses, and their weight."""
        self._is_open = False
        self.num_samples = 0 if before is None else int(before["samples"])
        """Of all ranks together."""

    @property
    def seconds(self) -> float:
        """That the epoch took so far."""
        return time.perf_counter() - self._began_s + (0.0 if self._before is None else self._before["seconds"])

    def add(self, said: Any) -> torch.Tensor:
        """Take what a training step returned for the current batch; its first loss, detached.

        `said`: a mean loss, (mean loss, count), or a dict of means with a name each.
        """
        batch = self._loop.batch
        assert batch is not None  # called inside `batches` only
        loss, count = with_count(said)
        named = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        self._names = tuple(named)
        values = tuple(torch.as_tensor(value).detach() for value in named.values())
        self._waiting.append(values)
        # A rank without samples has the mean of none, which is NaN, and no part in the sum.
        self._weights.append((batch.count if count is None else count) if batch.count else 0.0)
        self._ends.append(batch.is_last)
        self.num_samples += batch.global_count
        if len(self._waiting) >= _FLUSH:
            self._flush()
        return values[0]

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = torch.stack(
            [torch.stack([one.float() if one.dtype.itemsize < 4 else one for one in row]) for row in self._waiting]
        )
        for values, weight, is_end in zip(table.tolist(), self._weights, self._ends, strict=True):
            sums = [value * weight if weight else 0.0 for value in values] + [weight]
            if self._is_open:
                self._updates[-1] = [a + b for a, b in zip(self._updates[-1], sums, strict=True)]
            else:
                self._updates.append(sums)
            self._is_open = not is_end
        self._waiting, self._weights, self._ends = [], [], []

    def close(self, num_updates: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Means over the epoch, NaN where it had no samples, and the rows of its updates. Collective.

        The last of them is number `num_updates`.
        """
        table = self._table()
        totals = table.sum(0).tolist()
        # There is no sample where a fit goes on behind the last batch of an epoch.
        weight = totals[-1] or math.nan
        means = {name: total / weight for name, total in zip(self._names, totals, strict=False)}
        first = num_updates - len(table)
        rows: list[dict[str, Any]] = [
            {"update": first + last} | {name: total / weight for name, total in zip(self._names, sums, strict=True)}
            for last, (*sums, weight) in thin(table.tolist(), _MAX_ROWS)
            if weight
        ]
        return means, rows

    def state_dict(self) -> dict[str, Any]:
        """The epoch up to now: a table of all ranks' sums and weights, with a row for each update. Collective."""
        table = self._table()
        return {"names": list(self._names), "table": table, "samples": self.num_samples, "seconds": self.seconds}

    def _table(self) -> torch.Tensor:
        self._flush()
        mine = torch.tensor(self._updates, dtype=torch.float64).reshape(-1, len(self._names) + 1)
        table = self._loop.reduce(mine, "sum").cpu()
        before = self._before
        if before is None:
            return table
        if not self._updates:
            self._names = tuple(before["names"])
        if list(self._names) != list(before["names"]):  # another program now: of what it did before, samples count
            return table
        return torch.cat([before["table"], table.reshape(-1, len(self._names) + 1)])
