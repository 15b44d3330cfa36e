# SPDX-License-Identifier: Apache-2.0
"""When an interrupt is raised in a rank, and when it is held back."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tornado.ioloop import IOLoop

from ddpilot.session.rank.interrupts import (
    InterruptHandler,
    TimeLimitExpired,
    is_taking_lock,
    time_limit,
    uninterrupted,
)


@pytest.fixture
def handler() -> Iterator[InterruptHandler]:
    """A handler that has taken SIGINT over."""
    loop = IOLoop(make_current=False)
    before = signal.getsignal(signal.SIGINT)
    handler = InterruptHandler(loop)
    handler.install()
    yield handler
    signal.signal(signal.SIGINT, before)
    for descriptor in (handler._woken, handler._waker):  # of the process for good, in a rank
        os.close(descriptor)
    loop.close()


def test_interrupt_handler_raises_while_it_is_armed(handler: InterruptHandler) -> None:
    """As Python's own does."""
    handler.arm()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_interrupt_handler_holds_back_an_interrupt_until_it_is_armed(handler: InterruptHandler) -> None:
    """Only once."""
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        handler.arm()
    handler.arm()


def test_interrupt_handler_drops_an_interrupt_after_it_is_disarmed(handler: InterruptHandler) -> None:
    """It was for the cell that has ended, not for the one that begins next."""
    handler.arm()
    handler.disarm()
    signal.raise_signal(signal.SIGINT)
    handler.install()
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


@pytest.fixture(autouse=True)
def pressed() -> Iterator[list[int]]:
    """Interrupts that reach the previous handler."""
    reached: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: reached.append(number))
    yield reached
    signal.signal(signal.SIGINT, before)


def _spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(("cpu_s", "limit_s"), [(0.001, 60.0), (60.0, 0.001)])
def test_time_limit_ends_the_body(pressed: list[int], cpu_s: float, limit_s: float) -> None:
    """The signal that does it does not reach the previous handler."""
    with pytest.raises(TimeLimitExpired), time_limit(cpu_s, limit_s):
        _spin()
    assert pressed == []


def test_time_limit_waits_for_a_machine_under_load(pressed: list[int]) -> None:
    """Which gives this process less CPU time than time passes: here none, while the body waits."""
    waited_s = []

    def work() -> None:
        before_s = time.process_time()
        for _ in range(20):
            threading.Event().wait(0.01)
        waited_s.append(time.process_time() - before_s)
        _spin()

    with pytest.raises(TimeLimitExpired), time_limit(cpu_s=0.05, limit_s=60.0):
        work()
    assert waited_s[0] < 0.05
    assert pressed == []


def test_time_limit_is_ended_by_an_interrupt_once(pressed: list[int]) -> None:
    """What follows inside is left to run."""
    followed: list[bool] = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            followed.append(True)

    with pytest.raises(TimeLimitExpired), time_limit(60.0, 60.0):
        work()
    assert followed == [True]
    assert pressed == []


def test_time_limit_restores_the_sigint_handler(pressed: list[int]) -> None:
    """Also after it was in time."""
    with time_limit(60.0, 60.0):
        pass
    signal.raise_signal(signal.SIGINT)
    assert pressed == [signal.SIGINT]


def test_time_limit_does_nothing_in_a_thread(pressed: list[int]) -> None:
    """Only the main thread receives signals."""
    done: list[bool] = []

    def work() -> None:
        with time_limit(0.0, 0.0), uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
    assert pressed == []


def test_uninterrupted_ignores_an_interrupt(pressed: list[int]) -> None:
    """What it would end has failed already."""
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert pressed == []
