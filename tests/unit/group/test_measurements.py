# SPDX-License-Identifier: Apache-2.0
"""Clocks of two nodes, compared over a real connection. Namespaces and blocked ports are in tests/dist/nodes."""

from __future__ import annotations

import time

import pytest

from ddpilot.group import measurements
from ddpilot.group.measurements import ClockServer, ask_clock
from tests.ports import kept_port


def test_ask_clock_finds_no_difference_on_one_machine() -> None:
    """Twice, since a server answers until it is closed."""
    with ClockServer("127.0.0.1") as server:
        for _ in range(2):
            reply = ask_clock("127.0.0.1", server.port, 5.0)
            assert abs(reply.offset_s) <= reply.error_s + 0.001


def test_ask_clock_finds_a_clock_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's thread has a clock that is 30 s ahead."""
    real, asking = time.time, []

    class Clock:
        @staticmethod
        def time() -> float:
            asking.append(1)
            return real() + 30.0 * (len(asking) % 3 == 2)  # asked before, in the middle by the server, and after

    with ClockServer("127.0.0.1") as server:
        monkeypatch.setattr(measurements, "time", Clock)
        assert ask_clock("127.0.0.1", server.port, 5.0).offset_s == pytest.approx(30.0, abs=1.0)


def test_ask_clock_raises_when_nothing_listens() -> None:
    """Refused at once."""
    with kept_port() as port, pytest.raises(OSError, match="refused"):
        ask_clock("127.0.0.1", port, 5.0)
