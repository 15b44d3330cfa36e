# SPDX-License-Identifier: Apache-2.0
"""Moves the checkpoints of an earlier run to a subdirectory when a new run starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_PREFIX = "earlier-"


def move_aside(folder: Path, names: Iterable[str]) -> Path:
    """Move the entries `names` of `folder`, in this order, to a new directory in it, and return its path.

    Names that do not exist are skipped. Raises OSError if a move fails.
    """
    number = 1 + sum(path.name.startswith(_PREFIX) for path in folder.iterdir())
    while (aside := folder / f"{_PREFIX}{number}").exists():
        number += 1
    aside.mkdir()
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside
