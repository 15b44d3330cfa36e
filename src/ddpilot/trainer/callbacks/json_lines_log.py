# SPDX-License-Identifier: Apache-2.0
"""`JsonLinesLog`: logs updates and epochs as JSON Lines."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import LineFile, check_every, epoch_row, set_aside, update_row
from ddpilot.trainer.run import Run


class JsonLinesLog(Callback):
    """Append one JSON object per line to `path`, on rank 0: every `every` updates (default 50) and after each epoch.

    "row" is "update" or "epoch" in each line. Lines are unbuffered: a killed process loses none. A run that resumes
    from a checkpoint, or fits again, continues the file: lines of repeated updates are removed. A new run renames an
    existing file by adding "-1" before its suffix. Non-finite numbers are the strings "nan", "inf" and "-inf", as JSON
    has none. Raises OSError, on all ranks, and LoopError for `every` below 1.
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
        assert self._file is not None  # opened in on_fit_start()
        self._file.write(json.dumps(_finite(row), allow_nan=False, default=str))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_before(line: str, run: Run) -> bool:
    """True if a line precedes the run's position, or is not a line of this log."""
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
