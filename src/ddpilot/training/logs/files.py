# SPDX-License-Identifier: Apache-2.0
"""`CsvLogger` and `JsonLinesLogger`: logs in files, which are truncated to the checkpoint when a run resumes."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ddpilot.checkpoint.atomic_files import replace_text
from ddpilot.training.logs.logger import Logger, LogStart, finite


class CsvLogger(Logger):
    """Write rows to `path`, a CSV file, on rank 0. A name that first appears later gets a column.

    Rows are appended unbuffered, so a killed process loses none. A run that resumes from a checkpoint continues the
    table: rows after the checkpoint are removed. A new run renames an existing file by adding "-1" before its suffix.
    Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.csv") -> None:
        self._path = Path(path)
        self._names: list[str] = []
        self._file: LineFile | None = None

    def __repr__(self) -> str:
        return f"CsvLogger('{self._path}')"

    def open(self, start: LogStart) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if start.is_new:
            rename_existing(self._path)
        self._names = []
        if self._path.exists():
            self._names, rows = self._read()
            self._replace(row for index, row in enumerate(rows) if start.is_kept(index, row))

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        new = [name for name in row if name not in self._names]
        if new:
            rows = self._read()[1] if self._names else []
            self.close()
            self._names += new
            self._replace(rows)
        if self._file is None:
            self._file = LineFile(self._path)
        self._file.write(_render(self._names, [row]))

    def close(self, *, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the names and rows of the file, without an incomplete last line."""
        text = self._path.read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        rows = list(reader)
        return list(reader.fieldnames or ()), rows

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        replace_text(self._path, f"{_render(self._names, [dict(zip(self._names, self._names, strict=True)), *rows])}\n")


def _render(names: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines of a table, without the last newline."""
    table = io.StringIO(newline="")
    csv.DictWriter(table, names, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return table.getvalue().removesuffix("\n")


class JsonLinesLogger(Logger):
    """Append one JSON object per row to `path`, on rank 0.

    "row" is "update", "epoch" or "interval" in each line. Lines are unbuffered: a killed process loses none. A run that
    resumes from a checkpoint continues the file: lines after the checkpoint are removed. A new run renames an existing
    file by adding "-1" before its suffix. Non-finite numbers are the strings "nan", "inf" and "-inf", as JSON has none.
    Raises OSError, on all ranks.
    """

    def __init__(self, path: str | os.PathLike[str] = "log.jsonl") -> None:
        self._path = Path(path)
        self._file: LineFile | None = None

    def __repr__(self) -> str:
        return f"JsonLinesLogger('{self._path}')"

    def open(self, start: LogStart) -> None:
        if start.is_new:
            rename_existing(self._path)
        rows = count()

        def is_kept(line: str) -> bool:
            try:
                row = json.loads(line)
                return start.is_kept(next(rows), row) if isinstance(row, dict) and "row" in row else True
            except (ValueError, KeyError, TypeError):  # not a line of this log
                return True

        self._file = LineFile(self._path, keep=is_kept)

    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        assert self._file is not None  # opened before
        self._file.write(json.dumps(finite({"row": kind, **row}), allow_nan=False, default=str))

    def close(self, *, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class LineFile:
    """Append lines to `path`, unbuffered: errors raise OSError immediately; a killed process loses no written line."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool] | None = None) -> None:
        """Open the file. `keep`: removes the lines for which it returns False, and an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None and path.is_file():  # a pipe or a terminal has no lines to keep
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
