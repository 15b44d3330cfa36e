# SPDX-License-Identifier: Apache-2.0
"""The socket of a launch's store."""

from __future__ import annotations

import socket

from ddpilot.launching.rank_server.job import bind_listener


def test_bind_listener_listens_on_loopback_alone() -> None:
    """Two listeners have two ports, on loopback only, and the ports stay reserved."""
    with bind_listener() as first, bind_listener() as second:
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        assert port != second.getsockname()[1]
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        with socket.create_connection((host, port), timeout=5):
            first.accept()[0].close()
