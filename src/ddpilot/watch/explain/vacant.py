# SPDX-License-Identifier: Apache-2.0
"""init_process_group that cannot complete: WORLD_SIZE exceeds the number of ranks, or two ranks use the same RANK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.watch.explain.text import lay_out, merge_rows, place_of, say_place, who_does
from ddpilot.watch.snapshot.model import Frame, JobView
from ddpilot.watch.snapshot.stacks import innermost

_MAX_WORLD_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Vacancy:
    """All ranks of `view` are in init_process_group, or were when they ended, and none of them uses `numbers`."""

    view: JobView
    asking: Mapping[int, RankLog]
    numbers: tuple[int, ...]

    @property
    def waited_ns(self) -> int:
        """Time since the last rank called init_process_group, in nanoseconds."""
        return self.view.now_ns - max(log.entering_ns or 0 for log in self.asking.values())

    @property
    def is_proven(self) -> bool:
        """True if no other process can join: each rank has no child processes and uses its launcher's store."""
        return all(log.is_closed for log in self.asking.values())

    @property
    def line(self) -> Frame | None:
        """The line that the ranks are at; None if it is unknown."""
        return next(
            (line for rank in self.asking if (line := innermost(self.view.ranks[rank].stack)) is not None), None
        )


def find_vacancy(view: JobView) -> Vacancy | None:
    """Return the rank numbers that no rank uses although all have called init_process_group; None if there are none."""
    asking = {
        rank: seen.log for rank, seen in view.ranks.items() if seen.log is not None and seen.log.entering_ns is not None
    }
    if not asking or len(asking) < view.world_size:
        return None
    world_size = min(max(log.asked_world_size for log in asking.values()), _MAX_WORLD_SIZE)
    numbers = sorted(set(range(world_size)) - {log.asked_rank for log in asking.values()})
    return Vacancy(view, asking, tuple(numbers)) if numbers else None


def say_vacancy(vacancy: Vacancy) -> str:
    """Return one line that names the missing ranks."""
    missing = f"nobody asks to be {render_ranks(vacancy.numbers)}"
    return f"the group is not complete: {missing}; {_say_waiting(vacancy)}: {say_place(vacancy.line)}"


def _say_waiting(vacancy: Vacancy) -> str:
    return who_does(vacancy.asking, "waits in init_process_group")


def explain_vacancy(vacancy: Vacancy) -> Finding:
    """Return the finding: an error if it is proven, else a warning."""
    num_started, num_asked = vacancy.view.world_size, max(vacancy.numbers) + 1
    where = say_place(vacancy.line)
    rows = [
        (rank, f"asks to be rank {log.asked_rank} of {log.asked_world_size}", where)
        for rank, log in vacancy.asking.items()
    ]
    if num_asked > num_started:
        why = f"the group is to have {num_asked} ranks, and {num_started} were started"
    else:
        why = "each rank of a group has a number of its own, and several ask for the same one"
    if not vacancy.is_proven:
        why += "; somebody else may still come, such as a process that a rank has started"
    return make_finding(
        "DDP105",
        severity="error" if vacancy.is_proven else "warning",
        summary=f"{_say_waiting(vacancy)}, and nobody asks to be {render_ranks(vacancy.numbers)}",
        ranks=tuple(vacancy.asking),
        line=place_of(vacancy.line),
        evidence=lay_out(merge_rows(rows)),
        why=why,
        fix="leave `world_size=` and `rank=` out, so that they are those of the launcher, or start as many ranks",
    )
