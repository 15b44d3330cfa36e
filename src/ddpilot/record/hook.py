# SPDX-License-Identifier: Apache-2.0
"""Launch hook that starts recording in a rank before the user's code runs. Does not import torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ddpilot.record.collectives.start_stop import Recording

RING_DIR_VARIABLE = "DDPILOT_RING_DIR"
"""Environment variable with the folder for rings, created by its owner, private to the user and removed after the ranks
have ended."""


class RankStart(Protocol):
    """The part of a rank's start that `start` uses."""

    rank: int
    environ: dict[str, str]


@functools.lru_cache(maxsize=1024)  # asked for at each cell and poll
def ring_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of the ring of `rank` in the folder that `RING_DIR_VARIABLE` names."""
    return Path(folder) / f"rank{rank}.ring"


@functools.lru_cache(maxsize=1024)
def journal_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of guard's journal of `rank` in the folder that `RING_DIR_VARIABLE` names."""
    return Path(folder) / f"rank{rank}.journal"


def find_rings(folder: str | os.PathLike[str]) -> Mapping[int, Path]:
    """Return the rings in `folder` by rank; empty if the folder does not exist."""
    names = {path.stem.removeprefix("rank"): path for path in Path(folder).glob("rank*.ring")}
    found = {int(number): path for number, path in names.items() if number.isdecimal()}
    return dict(sorted(found.items()))


def start(rank_start: RankStart) -> Recording | None:
    """Record every collective of this process until it exits, in the folder of `RING_DIR_VARIABLE`.

    Other processes can also request its main thread's stack there (`ddpilot.record.main_thread`). Returns the
    recording, or None without that variable. Errors are reported in one line on stderr, and the rank continues.
    """
    folder = rank_start.environ.get(RING_DIR_VARIABLE)
    if not folder:
        return None
    try:
        from ddpilot.record.collectives.start_stop import start_recording
        from ddpilot.record.main_thread import answer_with_stacks, stacks_path

        answer_with_stacks(stacks_path(folder, rank_start.rank))
        return start_recording(ring_path(folder, rank_start.rank), rank=rank_start.rank)
    except Exception as error:  # noqa: BLE001 - reported, and must never stop training
        sys.stderr.write(f"ddpilot: rank {rank_start.rank}: collectives are not recorded: {error}\n")
        return None
