# SPDX-License-Identifier: Apache-2.0
"""Events of ranks are sent to one caller at a time."""

from __future__ import annotations

import pytest

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.launching.spawning import Wrote
from ddpilot.session.kernels.event_router import Event, EventRouter, Interrupted

LINE = Wrote(0, "stdout", b"line\n")


def make() -> tuple[EventRouter, list[Event | str]]:
    """A router, and what is shown outside turns, with "released" at the end of each."""
    shown: list[Event | str] = []
    return EventRouter(shown.append, lambda: shown.append("released")), shown


def test_router_sends_events_to_the_turn_or_else_to_show() -> None:
    """Events left in the queue are shown at the end of the turn."""
    router, shown = make()
    router.put(LINE)
    assert shown == [LINE]
    with router.turn("running") as turn:
        assert router.is_taken
        router.put(LINE)
        assert turn.events.get_nowait() == LINE
        router.put(Wrote(1, "stderr", b"late\n"))
        assert shown == [LINE]
    assert shown == [LINE, "released", Wrote(1, "stderr", b"late\n")]


def test_router_allows_one_turn_at_a_time() -> None:
    """The second caller gets an error, and the first continues."""
    router, _ = make()
    with router.turn("running"):
        with pytest.raises(LaunchError, match="completing: the ranks are busy with another cell. Wait for its end"):
            router.turn("completing").__enter__()
        assert router.is_taken
    with router.turn("running again"):
        assert router.is_taken


def test_router_raises_an_interrupt_that_is_left_in_the_queue() -> None:
    """Once: not if the body has raised a KeyboardInterrupt itself."""
    router, _ = make()
    with (
        pytest.raises(LaunchInterrupted, match="running was interrupted after it had finished"),
        router.turn("running"),
    ):
        router.put(Interrupted())
    with pytest.raises(KeyboardInterrupt, match="own"):
        stop_within(router)


def test_router_ends_a_turn_even_if_show_raises() -> None:
    """Otherwise every later cell would be refused."""

    def show(_event: Event) -> None:
        raise LookupError("cannot be shown")

    router = EventRouter(show, lambda: None)
    with pytest.raises(LookupError), router.turn("running") as turn:
        turn.events.put(LINE)
    with router.turn("running again"):
        assert router.is_taken


def stop_within(router: EventRouter) -> None:
    """Run a turn that is interrupted twice."""
    with router.turn("running"):
        router.put(Interrupted())
        raise KeyboardInterrupt("own")
