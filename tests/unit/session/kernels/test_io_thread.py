# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a session's sockets."""

from __future__ import annotations

import threading

from ddpilot.session.kernels.io_thread import IOThread


def test_io_thread_call_waits_for_an_order_of_any_length() -> None:
    """Longer than the time after which it looks whether the thread lives: on Python 3.10 too."""
    io_thread = IOThread(lambda event: None, lambda now: None, lambda error: None)
    io_thread.start()
    try:
        assert io_thread.call(lambda: threading.Event().wait(0.25)) is False
    finally:
        io_thread.stop()
