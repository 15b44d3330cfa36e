# SPDX-License-Identifier: Apache-2.0
"""Who is told what the ranks say."""

from __future__ import annotations

import pytest

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.launching.spawning import Wrote
from ddpilot.session.kernels.event_router import EventRouter
from ddpilot.session.kernels.events import Event, Interrupted

LINE = Wrote(0, "stdout", b"line\n")


def make() -> tuple[EventRouter, list[Event | str]]:
    """An attention, and what is shown outside turns, with "released" where one ended."""
    shown: list[Event | str] = []
    return EventRouter(shown.append, lambda: shown.append("released")), shown


def test_attention_goes_to_the_one_turn_and_else_to_what_shows() -> None:
    """What a turn has not taken is shown at its end."""
    attention, shown = make()
    attention.put(LINE)
    assert shown == [LINE]
    with attention.turn("running") as (events, _):
        assert attention.is_taken
        attention.put(LINE)
        assert events.get_nowait() == LINE
        attention.put(Wrote(1, "stderr", b"late\n"))
        assert shown == [LINE]
    assert shown == [LINE, "released", Wrote(1, "stderr", b"late\n")]


def test_attention_is_given_to_one_at_a_time() -> None:
    """The second is told what to do, and the first goes on."""
    attention, _ = make()
    with attention.turn("running"):
        with pytest.raises(LaunchError, match="completing: the ranks are busy with another cell. Wait for its end"):
            attention.turn("completing").__enter__()
        assert attention.is_taken
    with attention.turn("running again"):
        assert attention.is_taken


def test_attention_delivers_an_interrupt_that_nobody_took() -> None:
    """As one line: what was running is over. Where it ends as stopped anyway, once is enough."""
    attention, _ = make()
    with (
        pytest.raises(LaunchInterrupted, match="running was over already when it was stopped"),
        attention.turn("running"),
    ):
        attention.put(Interrupted())
    with pytest.raises(KeyboardInterrupt, match="own"):
        stop_within(attention)


def test_attention_is_given_back_where_showing_what_is_left_fails() -> None:
    """Else every later cell would be refused, since the ranks are busy with another."""

    def show(_event: Event) -> None:
        raise LookupError("cannot be shown")

    attention = EventRouter(show, lambda: None)
    with pytest.raises(LookupError), attention.turn("running") as (events, _):
        events.put(LINE)
    with attention.turn("running again"):
        assert attention.is_taken


def stop_within(attention: EventRouter) -> None:
    """A turn that is stopped, and stopped again on its way out."""
    with attention.turn("running"):
        attention.put(Interrupted())
        raise KeyboardInterrupt("own")
