# SPDX-License-Identifier: Apache-2.0
"""Losses that a training step returns: check, accumulate over an epoch, and reduce over the ranks once, at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
_MAX_ROWS_OF_INTERVAL = 100


class LossSums:
    """Sums over all ranks of the losses of an epoch or an interval, with the weight of each sum.

    `state`: a `state_dict`, to continue from.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.num_samples = int(state.get("samples", 0))
        """Number of samples on all ranks."""
        self.seconds = float(state.get("seconds", 0.0))
        """Duration of the training."""
        self._adds_up = bool(state.get("adds_up", False))
        self._sums: dict[str, tuple[float, float]] = {
            name: (total, weight) for name, total, weight in state.get("sums", ())
        }

    def add(self, part: LossPart) -> None:
        """Add the sums of a part of the training."""
        self.num_samples += part.num_samples
        self.seconds += part.seconds
        self._adds_up |= part.adds_up
        for name, total, weight in zip(part.names, part.sums[::2], part.sums[1::2], strict=True):
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + weight

    def means(self) -> dict[str, float]:
        """Return the means, NaN without samples."""
        # There are no samples if a fit resumes after the last batch of an epoch.
        sums = self._sums or {"loss": (0.0, 0.0)}
        return with_sum(_means(list(sums), [number for pair in sums.values() for number in pair]), self._adds_up)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, equal on all ranks."""
        sums = [(name, *pair) for name, pair in self._sums.items()]
        return {"samples": self.num_samples, "seconds": self.seconds, "adds_up": self._adds_up, "sums": sums}


@dataclass(frozen=True)
class LossPart:
    """The losses of consecutive updates, of all ranks."""

    names: list[str]
    sums: list[float]
    """For each name, the sum of the losses and its weight."""
    rows: list[dict[str, Any]]
    """The mean losses of each update, or of several consecutive ones."""
    num_samples: int
    seconds: float
    adds_up: bool
    """True if the sum of the means is also recorded, as "loss"."""


class EpochLosses:
    """Sums of losses, weighted by the number of samples or tokens of each mean, for each update of one epoch.

    `before`: the `state_dict` of an epoch that resumes from a checkpoint in its middle.
    """

    def __init__(self, loop: Loop, before: Mapping[str, Any] | None = None) -> None:
        self._loop = loop
        self.sums = LossSums(None if before is None else before.get("taken"))
        """The parts of the epoch that `take` has returned."""
        self._before = before
        self._num_samples = 0 if before is None else int(before["samples"]) - self.sums.num_samples
        self._seconds = 0.0 if before is None else before["seconds"] - self.sums.seconds
        self._began_s = time.perf_counter()
        self._names: list[str] = []
        self._waiting: list[tuple[dict[str, torch.Tensor | float], dict[str, float], bool]] = []
        """For each batch, the losses, their weights, and True if it is the last one of its update."""
        self._adds_up = False
        self._updates: list[dict[str, tuple[float, float]]] = []
        """For each update and name, the sum of this rank's losses and the weight of that sum."""
        self._is_open = False

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
        self._num_samples += batch.global_count
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

    def take(self, num_updates: int, *, ends_interval: bool = False) -> LossPart:
        """Return the losses since the last call, add them to `sums`, and start again without any. Collective.

        The last update has number `num_updates`. Names that are missing in all batches of a row are NaN there.
        `ends_interval`: there are many more parts like this one, which then has fewer rows.
        """
        names, table = self._table()
        first = num_updates - len(table)
        rows: list[dict[str, Any]] = [
            {"update": first + last} | with_sum(_means(names, sums), self._adds_up)
            for last, sums in thin(table.tolist(), _MAX_ROWS_OF_INTERVAL if ends_interval else _MAX_ROWS)
            if any(sums[1::2])
        ]
        sums = table.sum(0).tolist()
        part = LossPart(names, sums, rows, self._num_samples, self._elapsed_s(), self._adds_up)
        self.sums.add(part)
        self._before, self._num_samples, self._updates = None, 0, []
        self.restart_clock()
        return part

    def restart_clock(self) -> None:
        """Measure the next part's duration from now on."""
        self._seconds, self._began_s = 0.0, time.perf_counter()

    def _elapsed_s(self) -> float:
        return self._seconds + time.perf_counter() - self._began_s

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch so far: a table of all ranks' sums and weights, one row per update. Collective.

        The table is of the updates since `take` was called; "taken" has the sums of those before.
        """
        names, table = self._table()
        samples, seconds = self.sums.num_samples + self._num_samples, self.sums.seconds + self._elapsed_s()
        return {
            "names": names,
            "table": table,
            "samples": samples,
            "seconds": seconds,
            "taken": self.sums.state_dict(),
        }

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


def with_sum(means: dict[str, float], adds_up: bool) -> dict[str, float]:
    """Return `means`, with their sum as "loss" if `adds_up` and there is none."""
    if not adds_up or "loss" in means:
        return means
    known = [value for value in means.values() if not math.isnan(value)]  # a mean over nothing adds nothing
    return {"loss": sum(known) if known else math.nan, **means}


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
