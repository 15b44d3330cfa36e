# SPDX-License-Identifier: Apache-2.0
"""Puts the checkpoints of an earlier run out of the way of a new one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_PREFIX = "earlier-"


def move_aside(folder: Path, names: Iterable[str]) -> Path:
    """Move the entries of `folder` called `names`, in this order, into a new directory in it, and return that.

    A name that is not there is left out. OSError where that fails.
    """
    number = 1 + sum(path.name.startswith(_PREFIX) for path in folder.iterdir())
    while (aside := folder / f"{_PREFIX}{number}").exists():
        number += 1
    aside.mkdir()
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside
