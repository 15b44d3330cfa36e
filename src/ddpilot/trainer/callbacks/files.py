# SPDX-License-Identifier: Apache-2.0
"""A text file to which lines are appended, unbuffered."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from ddpilot.checkpoint.atomic_files import replace_text


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


def set_aside(path: Path) -> Path | None:
    """Rename an earlier run's file at `path` to the first free one of name-1, name-2, ...; None without one."""
    if not path.is_file():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside
