# SPDX-License-Identifier: Apache-2.0
"""`RowLog`, the base class of logs; rows as plain numbers, files to which they are appended, monitored metrics."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ddpilot.checkpoint.atomic_files import replace_text
from ddpilot.errors import LoopError, did_you_mean
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.history import flatten
from ddpilot.trainer.run import Run


def update_row(run: Run) -> dict[str, Any]:
    """Return the row of the current update: "batch_loss", this rank's mean of the batch, and callbacks' measurements.

    Waits for the device if it is still computing them.
    """
    row = {"epoch": run.epoch, "update": run.update, "batch_loss": run.loss, **run.values}
    return {name: plain(value) for name, value in row.items() if value is not None}


def epoch_row(run: Run) -> dict[str, Any]:
    """Return the row of the current epoch, with nested dicts flattened to "name.key"."""
    return {name: plain(value) for name, value in flatten(run.metrics).items()}


def plain(value: Any) -> Any:
    """Convert a tensor with one element to a number, and other tensors and arrays to lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `row` that are numbers, as floats."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def check_every(name: str, every: int) -> int:
    """Return `every`, a number of updates. Raises LoopError below 1."""
    if every < 1:
        raise LoopError(f"making a {name}", found=f"`every` is {every}", fix="Give a number of updates, 1 or more.")
    return every


class RowLog(Callback):
    """Base class of logs of updates and epochs: calls `_write` with each row, and `_close` when the fit ends."""

    def __init__(self, every: int) -> None:
        self._every = check_every(type(self).__name__, every)

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            self._write("update", update_row(run), run.update)

    def on_epoch_end(self, run: Run) -> None:
        self._write("epoch", epoch_row(run), run.update)

    def on_fit_end(self, run: Run) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close(failed=True)

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        raise NotImplementedError

    def _close(self, *, failed: bool = False) -> None:
        """Close the log. Idempotent."""


class MonitoredMetric:
    """A monitored metric of the epochs' rows, and its best value.

    `mode`: "min" if lower is better, "max" if higher is better. `min_delta`: improvements of at most this much do not
    count. NaN is never better. Raises LoopError for other modes and for a negative `min_delta`.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        did = f"monitoring {monitor!r}"
        if mode not in ("min", "max"):
            raise LoopError(did, found=f"`mode` is {mode!r}", fix="Use 'min' (as for a loss) or 'max'.")
        if not min_delta >= 0:
            raise LoopError(did, found=f"`min_delta` is {min_delta}", fix="Use 0 or more.")
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self.best: float | None = None
        """None before the first number."""

    def read(self, run: Run) -> float | None:
        """Return the value of the last epoch; None if it was not validated, see `Run.skips_validation`.

        Also None after a stop in the middle of an epoch. Raises LoopError if the epoch should have the metric.
        """
        row = epoch_row(run)
        if isinstance(value := row.get(self.monitor), int | float):
            return float(value)
        if run.loop.next_batch or (run.skips_validation and self.monitor.startswith("val_")):
            return None
        near = did_you_mean(self.monitor, numbers(row), show=repr)
        raise LoopError(
            f"monitoring {self.monitor!r} in epoch {run.epoch}",
            found=f"its row has {', '.join(map(repr, numbers(row)))}",
            fix=f"{near} Choose one of these; names that begin with 'val_' need a validation set.".lstrip(),
            rank=run.loop.rank,
        )

    def improve(self, value: float) -> bool:
        """Return True if `value` is better than the best so far, which it then replaces."""
        if math.isnan(value) or (self.best is not None and self._sign * (value - self.best) <= self._min_delta):
            return False
        self.best = value
        return True


class LineFile:
    """Append lines to `path`, unbuffered: errors raise OSError immediately; a killed process loses no written line."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool]) -> None:
        """Open the file and keep those of its lines for which `keep` returns True, without an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():  # a pipe or a terminal has no lines to keep
            *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
            replace_text(path, "".join(f"{line}\n" for line in lines if keep(line)))
        self._file: io.FileIO | None = io.FileIO(path, "a")

    def write(self, line: str) -> None:
        """Append `line` and a newline."""
        data = f"{line}\n".encode()
        while data and self._file is not None:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def rename_existing(path: Path) -> None:
    """Rename an earlier run's file at `path`, if there is one, to the first free name of name-1, name-2, ..."""
    if path.is_file():
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
        path.rename(next(name for name in names if not name.exists()))
