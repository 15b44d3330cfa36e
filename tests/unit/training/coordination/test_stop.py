# SPDX-License-Identifier: Apache-2.0
"""Flags of one rank, as all ranks of a FakeGroup raise them; and the signals that set them."""

from __future__ import annotations

import signal

import pytest

from ddpilot import FakeGroup
from ddpilot.training.coordination.stop import MAX_INTERVAL, REASONS, FlagExchange, StopSignals


@pytest.mark.parametrize("world_size", [1, 2])
def test_decider_exchanges_counts_and_reasons(world_size: int) -> None:
    """Counts and bad losses are summed over ranks; reasons stay once they were said."""
    decider = FlagExchange(FakeGroup(world_size=world_size))
    decider.begin(count=3.0, is_bad=True)
    decider.request("SIGTERM")
    decision = decider.finish()
    assert (decision.count, decision.num_bad, decision.reasons) == (3.0 * world_size, world_size, ())
    assert decider.finish().reasons == decider.reasons == ("SIGTERM",)


def test_decider_stops_when_the_time_is_up() -> None:
    """It counts from the start of training, once."""
    clock = [0.0]
    decider = FlagExchange(FakeGroup(), max_time_s=1.0, clock=lambda: clock[0])
    clock[0] = 100.0  # a model was made, and data downloaded
    assert decider.finish().reasons == ()
    expected: list[tuple[float, tuple[str, ...]]] = [(100.0, ()), (101.0, ()), (101.1, ("time",))]
    for now_s, reasons in expected:
        clock[0] = now_s
        decider.start()
        assert decider.finish().reasons == reasons


def gaps(decider: FlagExchange, clock: list[float], duration_s: float, num: int) -> list[int]:
    """How many updates of `duration_s` lie between exchanges, `num` times."""
    found = []
    for _ in range(num):
        count = 1
        clock[0] += duration_s
        while not decider.next_update():
            count += 1
            clock[0] += duration_s
        decider.begin()
        decider.finish()
        found.append(count)
    return found


def test_decider_exchanges_every_tenth_of_a_second_and_grows_into_it() -> None:
    """With every update at first and where updates are long, every 32 at most; alone it costs nothing to look."""
    clock = [0.0]
    decider = FlagExchange(FakeGroup(world_size=2), clock=lambda: clock[0])
    assert gaps(decider, clock, 1e-4, 8) == [1, 2, 4, 8, 16, MAX_INTERVAL, MAX_INTERVAL, MAX_INTERVAL]
    assert gaps(decider, clock, 0.0099, 4) == [MAX_INTERVAL, 10, 10, 10]
    assert gaps(decider, clock, 1.0, 3) == [10, 1, 1]
    assert gaps(decider, clock, 0.0, 3) == [1, 2, 4]
    assert gaps(FlagExchange(FakeGroup(), clock=lambda: clock[0]), clock, 1e-4, 3) == [1, 1, 1]


def test_what_every_rank_says_needs_no_exchange() -> None:
    """It is decided at once, beside what an exchange has told."""
    decider = FlagExchange(FakeGroup(world_size=2))
    decider.request("time")
    decider.finish()
    decider.agree("asked")
    assert decider.reasons == ("asked", "time")


def test_signals_set_a_flag_and_a_second_interrupt_interrupts() -> None:
    """While entered, also twice; afterwards every handler is what it was."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    said: list[str] = []
    stops = StopSignals(said.append)
    with stops, stops:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            if before[number] == signal.SIG_DFL or number == signal.SIGINT:
                signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert set(said) <= set(REASONS)
    assert said.count("SIGINT") == 1
    assert {number: signal.getsignal(number) for number in before} == before


def test_signals_leave_a_handler_of_other_code_alone() -> None:
    """SIGUSR1 is a user's own to handle."""
    said: list[str] = []
    theirs: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: theirs.append(number))
    try:
        with StopSignals(said.append):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (said, theirs) == ([], [signal.SIGUSR1])
