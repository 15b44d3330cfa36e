# SPDX-License-Identifier: Apache-2.0
"""Ends of processes as the system gives them."""

from __future__ import annotations

import signal

import pytest

from ddpilot.launching.rank_reports import Exited


@pytest.mark.parametrize(
    ("status", "signal_name", "exitcode"),
    [
        (0, None, 0),
        (3 << 8, None, 3),
        (255 << 8, None, 255),
        (signal.SIGKILL, "SIGKILL", -9),
        (signal.SIGSEGV | 0x80, "SIGSEGV", -11),
        (signal.SIGRTMIN, "SIGRTMIN", -34),
        (40, "signal 40", -40),
    ],
)
def test_exited_reads_the_status_of_a_process(status: int, signal_name: str | None, exitcode: int) -> None:
    """Signal, with or without a core dump, or exit code."""
    exited = Exited(rank=0, status=status, peak_memory_bytes=0, time_s=0.0)
    assert (exited.signal_name, exited.exitcode) == (signal_name, exitcode)
