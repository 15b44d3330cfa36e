# SPDX-License-Identifier: Apache-2.0
"""Start recording in a rank that a launcher or a session starts: a hook for before the user's code. Free of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ddpilot.record.recording import Recording

RING_DIR_VARIABLE = "DDPILOT_RING_DIR"
"""Names the folder for the rings; its owner makes it, private to the user, and removes it after the ranks are gone."""

HOOK = "ddpilot.record.hook:start"
"""What launchers are given to call `start` in every rank."""


class RankStart(Protocol):
    """What `start` needs to know of the rank that it runs in."""

    rank: int
    environ: dict[str, str]


def ring_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where `rank` records, in the folder that `RING_DIR_VARIABLE` names."""
    return Path(folder) / f"rank{rank}.ring"


def journal_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where guard notes what `rank` does, in the folder that `RING_DIR_VARIABLE` names."""
    return Path(folder) / f"rank{rank}.journal"


def find_rings(folder: str | os.PathLike[str]) -> Mapping[int, Path]:
    """The rings in `folder`, by rank; empty where there is no such folder."""
    names = {path.stem.removeprefix("rank"): path for path in Path(folder).glob("rank*.ring")}
    found = {int(number): path for number, path in names.items() if number.isdecimal()}
    return dict(sorted(found.items()))


def start(rank_start: RankStart) -> Recording | None:
    """Record every collective of this process from now on until it exits, in the folder of `RING_DIR_VARIABLE`.

    Its main thread's stack is to be had there too (`ddpilot.record.stacks`). Returns the recording; None without that
    variable. Whatever fails is said in one line on stderr, and the rank runs on.
    """
    folder = rank_start.environ.get(RING_DIR_VARIABLE)
    if not folder:
        return None
    try:
        from ddpilot.record.recording import start_recording
        from ddpilot.record.stacks import answer_with_stacks, stacks_path

        answer_with_stacks(stacks_path(folder, rank_start.rank))
        return start_recording(ring_path(folder, rank_start.rank), rank=rank_start.rank)
    except Exception as error:  # noqa: BLE001 - said, and never in the way of training
        sys.stderr.write(f"ddpilot: rank {rank_start.rank}: collectives are not recorded: {error}\n")
        return None
