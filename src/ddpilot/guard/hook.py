# SPDX-License-Identifier: Apache-2.0
"""Launch hook that starts guard in a rank, next to the one that starts recording. Does not import torch."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ddpilot.environments.variables import read_switch
from ddpilot.errors import TopologyError
from ddpilot.module_names import GUARD_PROBES
from ddpilot.record.hook import RING_DIR_VARIABLE, RankStart, journal_path

if TYPE_CHECKING:
    from ddpilot.guard.probe import Probe

GUARD_VARIABLE = "DDPILOT_GUARD"
"""Switch: if it is off, guard is disabled in a rank whose collectives are recorded."""


def start(rank_start: RankStart) -> None:
    """Note what training does on this rank until it exits, in the folder of `RING_DIR_VARIABLE`.

    Does nothing without that variable, or if the switch `GUARD_VARIABLE` is off. Errors are reported in one line on
    stderr, and the rank continues; a value of the switch that is not understood is reported by rank 0 and ignored.
    """
    folder = rank_start.environ.get(RING_DIR_VARIABLE)
    if not folder or not _is_on(rank_start):
        return
    try:
        stop = install(journal_path(folder, rank_start.rank), rank=rank_start.rank, probes=GUARD_PROBES)
        atexit.register(stop)
    except Exception as error:  # noqa: BLE001 - reported, and must never stop training
        _print_line(rank_start.rank, f"training is not guarded: {error}")


def _is_on(rank_start: RankStart) -> bool:
    try:
        return read_switch(rank_start.environ, GUARD_VARIABLE) is not False
    except TopologyError as error:
        if rank_start.rank == 0:
            _print_line(0, f"training is guarded: {error}")
        return True


def install(
    path: str | os.PathLike[str],
    *,
    rank: int,
    probes: Sequence[str | Callable[[], Probe]],
    report: Callable[[str], None] | None = None,
) -> Callable[[], None]:
    """Install `probes`, classes or their names ("module:class"), which write into the journal `path`.

    Returns an undo function. A probe that cannot be installed is off, which `report` reports (default: a line on
    stderr); other probes are not affected. Not collective. Raises `OSError` if there is no space for the journal.
    """
    import torch

    from ddpilot.guard.probe import Notes
    from ddpilot.record.call_sites import SiteFinder
    from ddpilot.record.journal import JournalWriter

    show = report or (lambda text: _print_line(rank, text))
    journal = JournalWriter(path, rank=rank)
    finder = SiteFinder(torch=os.path.dirname(torch.__file__))
    undo: list[tuple[Notes, list[Callable[[], None]]]] = []
    for given in probes:
        name = given if isinstance(given, str) else given.__name__
        notes = Notes(name, journal, rank=rank, finder=finder, report=show)
        try:
            probe = resolve_name(given)() if isinstance(given, str) else given()
            notes.name = probe.name
            undo.append((notes, probe.install(notes)))
        except Exception as error:  # noqa: BLE001 - reported once, and the rank continues
            notes.switch_off(error)

    def stop() -> None:
        while undo:
            notes, functions = undo.pop()
            while functions:
                functions.pop()()
            notes.is_off = True
        journal.close()

    return stop


def _print_line(rank: int, text: str) -> None:
    sys.stderr.write(f"ddpilot: rank {rank}: {text}\n")
