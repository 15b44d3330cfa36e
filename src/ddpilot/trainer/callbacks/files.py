# SPDX-License-Identifier: Apache-2.0
"""A text file that grows by whole lines, each with the system as soon as it is written."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from ddpilot.training.checkpoint.files import replace_text


class LineFile:
    """Appends lines to `path`; what fails raises OSError at once. A process that is killed loses no written line."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool]) -> None:
        """Open it, with those of its lines for which `keep` is True, and an unfinished last one cut off."""
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
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def set_aside(path: Path) -> Path | None:
    """Rename what an earlier run left at `path` to the first free of name-1, name-2, ...; None where there is none."""
    if not path.is_file():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside
