# SPDX-License-Identifier: Apache-2.0
"""Losses that a training step returns: check, accumulate over an epoch, and reduce over the ranks once, at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from ddpilot.errors import LoopError
from ddpilot.trainer.history import thin
from ddpilot.training.loop import Loop

_IGNORED = -100
"""The label that torch's cross entropy, and therefore transformers' models, ignore."""


class Summands(dict[str, Any]):
    """Losses by name, each a mean or (mean, count); their sum is minimized."""


def with_count(loss: Any) -> tuple[Any, float | None]:
    """Split what a loss function returned into the loss and what its mean is over (None: samples)."""
    return (loss[0], float(loss[1])) if isinstance(loss, tuple) else (loss, None)


def check_attached(loss: Any, rank: int) -> None:
    """Raise LoopError for a loss that does not require gradients."""
    if not getattr(loss, "requires_grad", False):
        what = f"a {type(loss).__name__}" if not isinstance(loss, torch.Tensor) else "a tensor without a gradient"
        raise LoopError(
            "training a batch",
            found=f"`loss_fn` returned {what}: nothing would be trained",
            fix="Return a tensor that is computed from the output, without `.detach()`, `.item()` or `no_grad`.",
            rank=rank,
        )


def check_weighted(loss: Any, output: Any, batch: Any, rank: int) -> None:
    """Raise LoopError for a transformers model's own loss without a count if it is not a mean over samples.

    That loss is a mean over the labels that are not -100, of which ranks with equally many samples may have different
    numbers.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not _is_own_loss(loss, output):
        return
    num_counted = int((labels != _IGNORED).sum())
    if num_counted < labels.numel():
        counts = f"(batch['labels'] != {_IGNORED}).sum()"
        shifted = counts.replace("'labels']", "'labels'][:, 1:]")
        raise LoopError(
            "training a batch",
            found=f"`loss_fn` returned `output.loss`, which is a mean over the {num_counted} of {labels.numel()} "
            f"labels that are not {_IGNORED}; without that count it would be taken as a mean over {len(labels)} "
            "samples, and the results would depend on the number of ranks",
            fix=f"Return (output.loss, {counts}); of a causal language model, which shifts its labels, "
            f"(output.loss, {shifted}).",
            rank=rank,
        )


def _is_own_loss(loss: Any, output: Any) -> bool:
    """True if `loss`, or one of several, is the `loss` of a transformers model's output."""
    is_theirs = any(base.__module__.partition(".")[0] == "transformers" for base in type(output).__mro__)
    given = loss.values() if isinstance(loss, Mapping) else [loss]
    return is_theirs and any(each is getattr(output, "loss", None) for each in given)


_FLUSH = 256
_MAX_ROWS = 1000


class EpochLosses:
    """Sums of losses, weighted by the number of samples or tokens of each mean, for each update of one epoch.

    `before`: the `state_dict` of an epoch that resumes from a checkpoint in its middle.
    """

    def __init__(self, loop: Loop, before: Mapping[str, Any] | None = None) -> None:
        self._loop = loop
        self._before = before
        self._began_s = time.perf_counter()
        self._names: list[str] = []
        self._waiting: list[tuple[dict[str, torch.Tensor | float], dict[str, float], bool]] = []
        """For each batch, the losses, their weights, and True if it is the last one of its update."""
        self._adds_up = False
        self._updates: list[dict[str, tuple[float, float]]] = []
        """For each update and name, the sum of this rank's losses and the weight of that sum."""
        self._is_open = False
        self.num_samples = 0 if before is None else int(before["samples"])
        """Number of samples on all ranks."""

    @property
    def seconds(self) -> float:
        """Duration of the epoch so far."""
        return time.perf_counter() - self._began_s + (0.0 if self._before is None else self._before["seconds"])

    def add(self, returned: Any) -> torch.Tensor:
        """Add what a training step returned for the current batch. Returns its first loss, detached.

        `returned`: a mean loss, (mean loss, count), or a dict of them by name; names may differ between batches. For
        `Summands`, the sum of the means is also recorded, as "loss". Raises LoopError for a value that is not a single
        number.
        """
        batch = self._loop.batch
        assert batch is not None  # called inside `batches` only
        loss, count = with_count(returned)
        named = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        self._adds_up = isinstance(loss, Summands)
        parts = {name: with_count(value) for name, value in named.items()}
        values = {name: _as_number(name, value, self._loop.rank) for name, (value, _) in parts.items()}
        self._names += [name for name in values if name not in self._names]
        # A rank without samples has a mean of NaN, and is left out of the sum.
        usual = (batch.count if count is None else count) if batch.count else 0.0
        own = {name: part for name, (_, part) in parts.items() if part is not None and batch.count}
        self._waiting.append((values, {name: own.get(name, usual) for name in values}, batch.is_last))
        self.num_samples += batch.global_count
        if len(self._waiting) >= _FLUSH:
            self._flush()
        return torch.as_tensor(next(iter(values.values()), math.nan))

    def _flush(self) -> None:
        fetched = _fetch([values for values, _, _ in self._waiting])
        for values, (_, weights, is_end) in zip(fetched, self._waiting, strict=True):
            if not self._is_open:
                self._updates.append({})
            sums = self._updates[-1]
            for name, value in values.items():
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = total + (value * weights[name] if weights[name] else 0.0), weight + weights[name]
            self._is_open = not is_end
        self._waiting = []

    def close(self, num_updates: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the epoch's means, NaN without samples, and the rows of its updates. Collective.

        The last update has number `num_updates`. Names that are missing in all batches of a row are NaN there.
        """
        names, table = self._table()
        # There are no samples if a fit resumes after the last batch of an epoch.
        means = self._with_sum(_means(names or ["loss"], table.sum(0).tolist()))
        first = num_updates - len(table)
        rows: list[dict[str, Any]] = [
            {"update": first + last} | self._with_sum(_means(names, sums))
            for last, sums in thin(table.tolist(), _MAX_ROWS)
            if any(sums[1::2])
        ]
        return means, rows

    def _with_sum(self, means: dict[str, float]) -> dict[str, float]:
        if not self._adds_up or "loss" in means:
            return means
        known = [value for value in means.values() if not math.isnan(value)]  # a mean over nothing adds nothing
        return {"loss": sum(known) if known else math.nan, **means}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch so far: a table of all ranks' sums and weights, one row per update. Collective."""
        names, table = self._table()
        return {"names": names, "table": table, "samples": self.num_samples, "seconds": self.seconds}

    def _table(self) -> tuple[list[str], torch.Tensor]:
        """Return the names of all ranks and earlier parts of the epoch; a sum and a weight column each. Collective."""
        self._flush()
        before = self._before or {"names": [], "table": torch.zeros(0, 0, dtype=torch.float64)}
        everyone = [self._names]
        if self._loop.world_size > 1:  # ranks may have had different kinds of batches
            everyone = self._loop.group.all_gather_object(self._names)
        names = list(dict.fromkeys([*before["names"], *(name for each in everyone for name in each)]))
        mine = [[part for name in names for part in row.get(name, (0.0, 0.0))] for row in self._updates]
        own = torch.tensor(mine, dtype=torch.float64).reshape(len(mine), 2 * len(names))
        reduced = self._loop.reduce(own, "sum").cpu()
        earlier = torch.zeros(len(before["table"]), 2 * len(names), dtype=torch.float64)
        earlier[:, : before["table"].shape[1]] = before["table"]  # its names come first
        return names, torch.cat([earlier, reduced])


def _as_number(name: str, value: Any, rank: int) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r}"
    found = f"`train_batch` returned {what} as {name!r}"
    raise LoopError("recording a loss", found=found, fix="Return numbers: means over this rank's samples.", rank=rank)


def _fetch(rows: list[dict[str, torch.Tensor | float]]) -> list[dict[str, float]]:
    """Return `rows` as numbers, with one synchronization per device."""
    fetched = [{name: value for name, value in row.items() if isinstance(value, float)} for row in rows]
    by_device: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                by_device.setdefault(value.device, []).append((index, name, value))
    for found in by_device.values():
        stacked = torch.stack([one.float() if one.dtype.itemsize < 4 else one for _, _, one in found])
        for (index, name, _), number in zip(found, stacked.tolist(), strict=True):
            fetched[index][name] = number
    return fetched


def _means(names: list[str], sums: list[float]) -> dict[str, float]:
    """Return the means from alternating columns of sums and weights; NaN if a weight is 0."""
    pairs = zip(names, sums[::2] or [0.0], sums[1::2] or [0.0], strict=True)
    return {name: total / weight if weight else math.nan for name, total, weight in pairs}
