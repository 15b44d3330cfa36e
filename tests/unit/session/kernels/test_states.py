# SPDX-License-Identifier: Apache-2.0
"""The state of ranks of a session, from start to end."""

from __future__ import annotations

import signal

from ddpilot.launching.rank_reports import Exited
from ddpilot.launching.spawning import Ended
from ddpilot.session.kernels.states import RankStates


def killed(rank: int) -> Ended:
    """The end of a rank's process by SIGKILL."""
    return Ended(rank, Exited(rank=rank, status=signal.SIGKILL, peak_memory_bytes=0, time_s=1.0))


def test_states_forget_the_end_of_a_rank_that_is_restarted() -> None:
    """The state of the other ranks does not change."""
    states = RankStates(3)
    for rank in (1, 2):
        states.note_end(killed(rank), ())
    assert (states.live, set(states.exited)) == ((0,), {1, 2})
    states.note_start(1)
    assert (states.live, set(states.exited), set(states.dead)) == ((0, 1), {2}, {2})


def test_states_record_once_that_ddpilot_killed_a_rank() -> None:
    """The next end of the same rank has a cause of its own."""
    states = RankStates(2)
    states.note_kill([1])
    states.note_end(killed(1), ())
    assert states.dead[1] == "was killed by ddpilot because it did not respond"
    states.note_start(1)
    states.note_end(killed(1), ())
    assert "ddpilot, since" not in states.dead[1]


def test_states_are_busy_from_the_start_of_a_cell_until_the_rank_is_idle() -> None:
    """A rank that was idle already keeps the time since when it is."""
    states = RankStates(2)
    states.note_work((0, 1), 7, 12.0)
    assert states.busy == {0: (7, 12.0), 1: (7, 12.0)}
    states.set_idle(0)
    since_s = states.since_s[0]
    states.set_all_idle()
    assert not states.busy
    assert states.since_s[0] == since_s <= states.since_s[1]
