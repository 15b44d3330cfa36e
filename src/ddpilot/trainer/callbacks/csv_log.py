# SPDX-License-Identifier: Apache-2.0
"""`CsvLog`: a CSV table with one row per epoch."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from ddpilot.checkpoint.atomic_files import replace_text
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import epoch_row, rename_existing
from ddpilot.trainer.run import Run


class CsvLog(Callback):
    """Write `path`, a CSV file with one row per epoch, after each epoch, on rank 0.

    The file is replaced atomically, so it is always complete, and a metric that first appears later gets a column. A
    run that resumes from a checkpoint, or fits again, continues the table: rows of repeated epochs are replaced. A new
    run renames an existing file by adding "-1" before its suffix. Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "epochs.csv") -> None:
        self._path = Path(path)
        self._rows: list[dict[str, Any]] = []

    def on_fit_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not run.update:
            rename_existing(self._path)
        self._rows = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._rows = [row for row in csv.DictReader(file) if int(row["epoch"]) < run.epoch]

    def on_epoch_end(self, run: Run) -> None:
        self._rows.append(epoch_row(run))
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        replace_text(self._path, table.getvalue())
