# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping` and `BestWeights`, which compare the epochs, or intervals of updates, by a metric."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ddpilot.checkpoint.atomic_files import HashingFile
from ddpilot.checkpoint.manifest import Monitor
from ddpilot.checkpoint.safetensors_file import check_dtypes, write_safetensors
from ddpilot.errors import LoopError, did_you_mean
from ddpilot.group.decorators import on_ranks
from ddpilot.group.device import broadcast_tensors
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.logs import epoch_row
from ddpilot.trainer.run import Run, find_inner
from ddpilot.training.logs.loggers import numbers
from ddpilot.training.models.sharding import (
    divide_as,
    gather,
    has_sharded_layer,
    has_shards,
    is_shard,
    local_part,
    reshard,
    sharded_layers,
)
from ddpilot.training.models.strategy import strategy_of
from ddpilot.training.options import Interval


class _BestEpoch(Callback):
    """Base class of callbacks that act on the epoch with the best value of a metric."""

    def __init__(self, monitor: str, mode: Literal["min", "max"], min_delta: float) -> None:
        self._monitor = Monitor(monitor, mode, min_delta)
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.best_update: int | None = None

    @property
    def monitor(self) -> str:
        """The monitored metric."""
        return self._monitor.name

    def on_epoch_end(self, run: Run) -> None:
        if not run.validate_every.counts_updates:
            self._look(run, "epochs")

    def on_interval_end(self, run: Run) -> None:
        self._look(run, "validations")

    def _look(self, run: Run, unit: str) -> None:
        """Act on the row of an epoch, or of a validation at the end of an interval."""
        raise NotImplementedError

    def _improves(self, run: Run) -> bool | None:
        """True if the last epoch or interval is the best one so far; it then becomes `best_epoch` and `best_update`.

        None if it was not validated, see `Run.skips_validation`, and after a stop in its middle. Raises LoopError if it
        should have the metric.
        """
        row = numbers(epoch_row(run))
        if self.monitor not in row:
            is_stopped = bool(run.loop.next_batch) and not run.validate_every.counts_updates
            if is_stopped or (run.skips_validation and self.monitor.startswith("val_")):
                return None
            near = did_you_mean(self.monitor, row, show=repr)
            raise LoopError(
                f"monitoring {self.monitor!r} in epoch {run.epoch}",
                found=f"its row has {', '.join(map(repr, row))}",
                fix=f"{near} Choose one of these; names that begin with 'val_' need a validation set.".lstrip(),
                rank=run.loop.rank,
            )
        if not self._monitor.is_better(row[self.monitor], self.best):
            return False
        self.best, self.best_epoch, self.best_update = row[self.monitor], run.epoch, run.update
        return True


class EarlyStopping(_BestEpoch):
    """Stop all ranks once `monitor` has not improved on its best value for `patience` epochs in a row.

    Epochs without validation because of `validate_every` do not count for a "val_" metric. If `validate_every` counts
    updates, `patience` counts its intervals, and all ranks stop right after the last of them. Rank 0 decides, from
    values that are equal on all ranks.

    - `monitor`: a name in the epochs' rows, such as "val_loss" (default) or "val_accuracy".
    - `mode`: "min" (default) if lower is better, "max" if higher is better.
    - `min_delta`: improvements of at most this much do not count.
    - `stop_at`: stop as soon as `monitor` reaches this value.
    - `start`: do not stop before this total number of epochs, or before "500 updates"; earlier epochs count for
      `patience`.
    - `restore_best`: load the weights of the best epoch into model and EMA at the end, on all ranks. Until then rank 0
      and checkpoints hold a copy in CPU memory. With sharded parameters each rank holds a copy of its shards, which
      rank 0 gathers for a checkpoint. The optimizer keeps its state.

    The attributes `best`, `best_epoch` and `best_update` are the best value so far, its epoch, and the number of
    updates then.

    A fit with a total (`until_epoch`, `max_updates`, or a `checkpoint_dir`) that was stopped stays stopped, also after
    resuming from a checkpoint. With a larger total, or with further epochs, patience starts over.

    Raises LoopError for invalid arguments, and after an epoch without this metric.
    """

    ranks = "all"  # restoring weights is collective

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        stop_at: float | None = None,
        start: int | str | None = None,
        restore_best: bool = False,
    ) -> None:
        did = "making an EarlyStopping"
        if patience < 1:
            found = f"`patience` is {patience}"
            raise LoopError(did, found=found, fix="Give a number of epochs, 1 or more.")
        super().__init__(monitor, mode, min_delta)
        self._patience = patience
        self._stop_at = stop_at
        self._start = None if start is None else Interval.parse(start, did=did, name="start", unit="epochs")
        self._restore_best = restore_best
        self._weights: list[torch.Tensor] | None = None
        self.num_bad = 0
        """Number of epochs since the best one."""
        self.stopped: str = ""
        """Why this callback stopped training; "" if it did not."""
        self.stopped_goal = 0
        """The total number of epochs, or with `max_updates` of updates, that this fit should have had."""
        self.stopped_unit = "epochs"
        """What `stopped_goal` counts: "epochs" or "updates"."""

    def on_fit_start(self, run: Run) -> None:
        unit, goal = _goal(run)
        if self.stopped and goal is not None and unit == self.stopped_unit and goal <= self.stopped_goal:
            run.loop.print(f"stopped earlier: {self.stopped}; a larger total trains further", flush=True)
            run.stop(everywhere=True)
        elif self.stopped:
            self.stopped, self.num_bad = "", 0
        if not _keeps_weights(run):
            self._weights = None
        elif self._weights is not None:  # whole, from a checkpoint
            self._weights = [divide_as(own, best).cpu() for own, best in zip(_tensors(run), self._weights, strict=True)]
        elif self._restore_best and self.best is not None:
            self._weights = _copy(run)  # an earlier fit ended with the best weights

    def _look(self, run: Run, unit: str) -> None:
        improves = self._improves(run)
        if improves is None:
            return
        self.num_bad = 0 if improves else self.num_bad + 1
        if improves and self._restore_best and _keeps_weights(run):
            self._weights = _copy(run)
        if self._start is not None and not self._start.is_due(0, _num_done(run, self._start, unit)):
            return
        value = numbers(epoch_row(run))[self.monitor]
        if self._stop_at is not None and self._monitor.reaches(value, self._stop_at):
            self.stopped = f"{self.monitor} is {value}, which reaches {self._stop_at}"
        elif self.num_bad >= self._patience:
            best = f"epoch {self.best_epoch}" if unit == "epochs" else f"update {self.best_update}"
            self.stopped = f"{self.monitor} was not better than {self.best} of {best} for {self.num_bad} {unit}"
        if self.stopped:
            self.stopped_unit, goal = _goal(run)
            self.stopped_goal = (run.num_epochs if goal is None else goal) or 0
            if run.loop.group.is_rank_zero:
                run.stop()
            run.loop.print(self.stopped, flush=True)

    def on_fit_end(self, run: Run) -> None:
        self.num_bad = 0  # patience starts over in the next fit
        if run.loop.group.broadcast_object(self._weights is not None):
            tensors = list(_tensors(run))
            with torch.no_grad():
                for tensor, best in zip(tensors, self._weights or (), strict=False):  # on rank 0, and shards on all
                    local_part(tensor).copy_(local_part(best))
            broadcast_tensors([one for one in tensors if not is_shard(one)], run.loop.group)
        self._weights = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._weights is None:
            return state
        keeps = has_shards(self._weights) and torch.distributed.get_rank() == 0
        return {**state, "weights": [gather(one, keeps=keeps) for one in self._weights]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        self._weights = kept.pop("weights", None)
        super().load_state_dict(kept)


def _num_done(run: Run, start: Interval, unit: str) -> int:
    """Return how many updates or epochs were completed; `unit`: "epochs" at the end of an epoch."""
    return run.update if start.counts_updates else run.epoch + (unit == "epochs")


def _goal(run: Run) -> tuple[str, int | None]:
    """Return the unit and the total at which the fit ends; None for further epochs."""
    return ("epochs", run.until_epoch) if run.max_updates is None else ("updates", run.max_updates)


def _tensors(run: Run) -> Iterator[torch.Tensor]:
    models: list[nn.Module] = [run.model, *([] if run.ema is None else [run.ema])]
    for model in models:
        reshard(sharded_layers(model))
        yield from model.parameters()
        yield from model.buffers()


def _keeps_weights(run: Run) -> bool:
    """True if this rank keeps the best weights: rank 0, and where parameters are sharded all ranks."""
    return run.loop.group.is_rank_zero or has_sharded_layer(run.model)


def _copy(run: Run) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in _tensors(run)]


class BestWeights(_BestEpoch):
    """Write the weights of the epoch with the best `monitor` to `path`, a safetensors file, on rank 0.

    If `validate_every` counts updates, the weights are those at the end of the best interval. With an EMA, its weights
    are written, because evaluations use them. Names have no prefixes, so any model of the same architecture loads them:
    `ddpilot.load_weights(model, path)`. The file is replaced atomically. To resume training, use `checkpoint_dir=`: a
    checkpoint holds more than the weights.

    `monitor`, `mode`, `min_delta`: as for `EarlyStopping`, and so are the attributes `best`, `best_epoch` and
    `best_update`.

    Raises OSError if the file cannot be written, and LoopError as `EarlyStopping` does, on all ranks.
    """

    _is_joint_if_sharded = True

    def __init__(
        self,
        path: str | os.PathLike[str] = "best.safetensors",
        monitor: str = "val_loss",
        *,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self._path = Path(path)

    def on_fit_start(self, run: Run) -> None:
        if run.loop.group.is_rank_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def _look(self, run: Run, unit: str) -> None:
        improves = on_ranks(0, broadcast=True)(self._improves) if has_sharded_layer(run.model) else self._improves
        if not improves(run):
            return
        weights = strategy_of(find_inner(run.evaluated)).weights(keeps=run.loop.group.is_rank_zero)
        if run.loop.group.is_rank_zero:
            self._write({name: tensor.cpu() for name, tensor in weights.items()})

    def _write(self, weights: dict[str, torch.Tensor]) -> None:
        check_dtypes(weights, where="the best weights")
        new = self._path.with_name(f".{self._path.name}.new")
        new.unlink(missing_ok=True)
        with HashingFile(new) as sink:
            write_safetensors(sink, weights)
        os.replace(new, self._path)
