# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a session's sockets."""

from __future__ import annotations

import threading

from ddpilot.session.kernels.io_thread import IOThread


def test_io_thread_call_waits_for_a_long_callback() -> None:
    """Longer than the interval at which it checks that the thread is alive, also on Python 3.10."""
    io_thread = IOThread(lambda event: None, lambda now: None, lambda error: None)
    io_thread.start()
    try:
        assert io_thread.call(lambda: threading.Event().wait(0.25)) is False
    finally:
        io_thread.stop()
