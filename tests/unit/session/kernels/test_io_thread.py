# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a session's sockets."""

from __future__ import annotations

import threading

from ddpilot.session.kernels.io_thread import IOThread


def test_hub_call_waits_for_an_order_of_any_length() -> None:
    """Longer than the time after which it looks whether the thread lives: on Python 3.10 too."""
    hub = IOThread(lambda event: None, lambda now: None, lambda error: None, lambda *sent: None)
    hub.start()
    try:
        assert hub.call(lambda: threading.Event().wait(0.25)) is False
    finally:
        hub.stop()
