# SPDX-License-Identifier: Apache-2.0
"""`JsonLinesLog`: updates and epochs as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.files import LineFile, set_aside
from ddpilot.trainer.callbacks.values import check_every, epoch_row, update_row
from ddpilot.trainer.run import Run


class JsonLinesLog(Callback):
    """Appends to `path` one JSON object a line, on rank 0: each `every` updates (default 50) and after each epoch.

    A line's "row" is "update" or "epoch". A line is with the system once it is written: a process that is killed loses
    none. A run that goes on from a checkpoint, or fits again, goes on with the file: lines of what is done again are
    cut. A new run moves a file that is there to `path` with "-1" before its suffix. Numbers that are not finite are
    the texts "nan", "inf" and "-inf", since JSON has none. Raises OSError, on all ranks, and LoopError for `every`
    below 1.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.jsonl", *, every: int = 50) -> None:
        self._path = Path(path)
        self._every = check_every("JsonLinesLog", every)
        self._file: LineFile | None = None

    def on_fit_start(self, run: Run) -> None:
        if not run.update:
            set_aside(self._path)
        self._file = LineFile(self._path, keep=lambda line: _is_before(line, run))

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            self._write({"row": "update", **update_row(run)})

    def on_epoch_end(self, run: Run) -> None:
        self._write({"row": "epoch", **epoch_row(run)})

    def on_fit_end(self, run: Run) -> None:
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None  # on_fit_start() has opened it
        self._file.write(json.dumps(_finite(row), allow_nan=False, default=str))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_before(line: str, run: Run) -> bool:
    """Whether a line is of what the run has behind it; what is no line of ours stays."""
    try:
        row = json.loads(line)
        is_epoch, number = row["row"] == "epoch", row["epoch"] if row["row"] == "epoch" else row["update"]
    except (ValueError, KeyError, TypeError):
        return True
    return bool(number < run.epoch if is_epoch else number <= run.update)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
