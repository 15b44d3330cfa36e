# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C as something to wait for."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from ddpilot.launching.interrupts import Escalation, InterruptCatcher, RankInterrupt, saw_interrupt


def test_interrupt_catcher_makes_an_interrupt_readable_and_restores_the_handler() -> None:
    """Inside, SIGINT raises nothing and wakes a selector once; after it, the old handler is back."""
    before = signal.getsignal(signal.SIGINT)
    with InterruptCatcher() as catcher:
        assert not catcher.take()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert select.select([catcher.fd], [], [], 0)[0] == [catcher.fd]
        catcher.clear()
        assert select.select([catcher.fd], [], [], 0)[0] == []
        assert catcher.take()
        assert not catcher.take()
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_catcher_delivers_an_interrupt_that_nobody_took() -> None:
    """Ctrl-C at the very end of a launch still stops the loop that launches."""
    with pytest.raises(KeyboardInterrupt), InterruptCatcher():
        signal.raise_signal(signal.SIGINT)


def test_interrupt_catcher_lets_an_exception_through_when_an_interrupt_came_too() -> None:
    """The exception that is on its way is not replaced."""

    def interrupted_and_failing() -> None:
        with InterruptCatcher():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        interrupted_and_failing()


def test_interrupt_catcher_holds_a_flood_of_interrupts() -> None:
    """More interrupts than its pipe can hold do not block the handler."""
    with InterruptCatcher() as catcher:
        for _ in range(70_000):
            catcher._on_signal(signal.SIGINT, None)
        assert catcher.take()


def test_saw_interrupt_is_true_once_a_rank_was_interrupted() -> None:
    """A launch gives values after Ctrl-C only where the function can have taken it as its cue to return."""
    before = signal.getsignal(signal.SIGINT)
    try:
        assert saw_interrupt(), "a handler of the user's own"
        handler = RankInterrupt()
        signal.signal(signal.SIGINT, handler)
        with handler:
            assert not saw_interrupt()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert saw_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_rank_interrupt_keeps_an_early_interrupt_for_the_function_and_drops_a_late_one() -> None:
    """Set-up code cannot swallow it; a value that is already on its way is not lost."""
    before = signal.getsignal(signal.SIGINT)
    try:
        handler = RankInterrupt()
        signal.signal(signal.SIGINT, handler)
        with handler:
            signal.getsignal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not saw_interrupt()
        with pytest.raises(KeyboardInterrupt), handler:
            pytest.fail("the function was entered")
        assert saw_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_catcher_leaves_signals_alone_when_in_a_thread() -> None:
    """Python delivers signals to the main thread only, where the handler is kept."""
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with InterruptCatcher() as catcher:
            seen.append((signal.getsignal(signal.SIGINT), os.fstat(catcher.fd) is not None))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, True)]


def test_interrupt_catcher_holds_a_scheduler_s_signal_until_it_leaves() -> None:
    """It wakes a selector, and can be settled; what other code handles is left alone."""
    with InterruptCatcher() as catcher:
        signal.raise_signal(signal.SIGTERM)
        assert select.select([catcher.fd], [], [], 0)[0] == [catcher.fd]
        assert catcher.stop == signal.SIGTERM
        catcher.stop = None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with InterruptCatcher() as catcher:
            signal.raise_signal(signal.SIGUSR1)
            assert (came, catcher.stop) == ([signal.SIGUSR1], None)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_escalation_takes_the_steps_that_are_due_in_order() -> None:
    """A step may add steps, which are taken too if they are due."""
    steps, taken = Escalation(), list[str]()
    steps.start((5.0, lambda _: taken.append("kill")), (1.0, lambda now: steps.add(now, lambda _: taken.append("now"))))
    steps.add(2.0, lambda _: taken.append("terminate"))
    assert steps.due_s == 1.0
    steps.run_due(2.5)
    assert taken == ["terminate", "now"]
    steps.run_due(4.9)
    assert steps.due_s == 5.0
    steps.advance(1.0)
    steps.run_due(4.0)
    assert taken == ["terminate", "now", "kill"]
    steps.run_due(9.0)
    assert taken == ["terminate", "now", "kill"]


def test_escalation_discards_a_step_wherever_it_is() -> None:
    """Other steps keep their times."""
    steps = Escalation()
    taken: list[float] = []
    steps.start((1.0, print), (2.0, taken.append), (3.0, print))
    steps.discard(print)
    assert steps.due_s == 2.0
    steps.run_due(4.0)
    assert taken == [4.0]
