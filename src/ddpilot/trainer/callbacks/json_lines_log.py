# SPDX-License-Identifier: Apache-2.0
"""`JsonLinesLog`: logs updates and epochs as JSON Lines."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ddpilot.trainer.callbacks.log_rows import LineFile, RowLog, rename_existing
from ddpilot.trainer.run import Run


class JsonLinesLog(RowLog):
    """Append one JSON object per line to `path`, on rank 0: every `every` updates (default 50) and after each epoch.

    "row" is "update" or "epoch" in each line. Lines are unbuffered: a killed process loses none. A run that resumes
    from a checkpoint, or fits again, continues the file: lines of repeated updates are removed. A new run renames an
    existing file by adding "-1" before its suffix. Non-finite numbers are the strings "nan", "inf" and "-inf", as JSON
    has none. Raises OSError, on all ranks, and LoopError for `every` below 1.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.jsonl", *, every: int = 50) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._file: LineFile | None = None

    def on_fit_start(self, run: Run) -> None:
        if not run.update:
            rename_existing(self._path)
        self._file = LineFile(self._path, keep=lambda line: _is_before(line, run))

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        assert self._file is not None  # opened in on_fit_start()
        self._file.write(json.dumps(_finite({"row": kind, **row}), allow_nan=False, default=str))

    def _close(self, *, failed: bool = False) -> None:
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
