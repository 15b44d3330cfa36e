# SPDX-License-Identifier: Apache-2.0
"""When a stop is raised in a rank, and when it is held back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from tornado.ioloop import IOLoop

from ddpilot.session.rank.interrupts import StopHandler, is_taking_lock


@pytest.fixture
def handler() -> Iterator[StopHandler]:
    """A handler that has taken SIGINT over."""
    loop = IOLoop(make_current=False)
    before = signal.getsignal(signal.SIGINT)
    handler = StopHandler(loop)
    handler.take_over()
    yield handler
    signal.signal(signal.SIGINT, before)
    for descriptor in (handler._woken, handler._waker):  # of the process for good, in a rank
        os.close(descriptor)
    loop.close()


def test_stop_handler_raises_while_it_is_armed(handler: StopHandler) -> None:
    """As Python's own does."""
    handler.arm()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_stop_handler_keeps_a_stop_that_comes_before_it_is_armed(handler: StopHandler) -> None:
    """Once: the second time there is none any more."""
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        handler.arm()
    handler.arm()


def test_stop_handler_drops_a_stop_that_comes_too_late(handler: StopHandler) -> None:
    """It was for the cell that has ended, not for the one that begins next."""
    handler.arm()
    handler.disarm()
    signal.raise_signal(signal.SIGINT)
    handler.take_over()
    handler.arm()


def test_is_taking_lock_sees_the_standard_library_s_locks() -> None:
    """A thread that waits in one, and this one, which does not."""
    lock = threading.Condition()
    lock.acquire()
    waiter = threading.Thread(target=lock.__enter__)
    waiter.start()
    assert waiter.ident is not None
    frame = sys._current_frames()[waiter.ident]
    while not is_taking_lock(frame):  # it has not come there yet
        frame = sys._current_frames()[waiter.ident]
    lock.release()
    waiter.join()
    assert not is_taking_lock(sys._getframe())
