# SPDX-License-Identifier: Apache-2.0
"""What is cut short after a while, or by a stop, and leaves the stop button as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ddpilot.session.rank.hurried import TooSlow, hurried, uninterrupted


@pytest.fixture(autouse=True)
def pressed() -> Iterator[list[int]]:
    """Stops that reach whoever listened before."""
    reached: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: reached.append(number))
    yield reached
    signal.signal(signal.SIGINT, before)


def _spin() -> None:
    while True:
        pass


def test_hurried_ends_what_takes_too_long(pressed: list[int]) -> None:
    """And nobody hears of the signal that does it."""
    with pytest.raises(TooSlow), hurried(0.001):
        _spin()
    assert pressed == []


def test_hurried_is_ended_by_a_stop_once(pressed: list[int]) -> None:
    """What follows inside is left to run."""
    followed: list[bool] = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            followed.append(True)

    with pytest.raises(TooSlow), hurried(60.0):
        work()
    assert followed == [True]
    assert pressed == []


def test_hurried_leaves_the_stop_button_as_it_was(pressed: list[int]) -> None:
    """Also after it was in time."""
    with hurried(60.0):
        pass
    signal.raise_signal(signal.SIGINT)
    assert pressed == [signal.SIGINT]


def test_hurried_does_nothing_in_another_thread(pressed: list[int]) -> None:
    """Signals are the main thread's."""
    done: list[bool] = []

    def work() -> None:
        with hurried(0.0), uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
    assert pressed == []


def test_uninterrupted_drops_a_stop(pressed: list[int]) -> None:
    """What it would end has failed already."""
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert pressed == []
