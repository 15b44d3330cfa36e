# SPDX-License-Identifier: Apache-2.0
"""How ranks of a session stand, from their start over cells to their ends."""

from __future__ import annotations

import signal

from ddpilot.launching.rank_reports import Exited
from ddpilot.launching.spawning import Ended
from ddpilot.session.kernels.states import RankStates


def killed(rank: int) -> Ended:
    """The end of a rank's process by SIGKILL."""
    return Ended(rank, Exited(rank=rank, status=signal.SIGKILL, peak_memory_bytes=0, time_s=1.0))


def test_standing_forgets_the_end_of_a_rank_that_is_started_anew() -> None:
    """The others stand as before."""
    standing = RankStates(3)
    for rank in (1, 2):
        standing.note_end(killed(rank), ())
    assert (standing.live, set(standing.exited)) == ((0,), {1, 2})
    standing.note_start(1)
    assert (standing.live, set(standing.exited), set(standing.dead)) == ((0, 1), {2}, {2})


def test_standing_says_who_killed_a_rank_once() -> None:
    """The next end of the same rank has a cause of its own."""
    standing = RankStates(2)
    standing.note_kill([1])
    standing.note_end(killed(1), ())
    assert standing.dead[1] == "was killed by ddpilot, since nothing else stopped it"
    standing.note_start(1)
    standing.note_end(killed(1), ())
    assert "ddpilot, since" not in standing.dead[1]


def test_standing_is_busy_from_the_beginning_of_a_cell_until_the_rank_is_idle() -> None:
    """A rank that was idle already keeps the time since when it is."""
    standing = RankStates(2)
    standing.note_work((0, 1), 7, 12.0)
    assert standing.busy == {0: (7, 12.0), 1: (7, 12.0)}
    standing.set_idle(0)
    since_s = standing.since_s[0]
    standing.set_all_idle()
    assert not standing.busy
    assert standing.since_s[0] == since_s <= standing.since_s[1]
