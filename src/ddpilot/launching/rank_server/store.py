# SPDX-License-Identifier: Apache-2.0
"""The store process of a launch: serves torch's TCPStore on a socket that the parent bound to loopback."""

from __future__ import annotations

import functools
import os
import signal
import socket
from typing import NoReturn

from ddpilot.launching.rank_server.process import outlive_stops


def run_store(listen_fd: int) -> NoReturn:
    """Serve the store until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ddpilot.group.store import host_on

    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        host, port = listener.getsockname()
    store = host_on(listen_fd, functools.partial(TCPStore, host, port, None, True, wait_for_workers=False))
    outlive_stops()
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable")


def bind_listener() -> socket.socket:
    """A socket that listens on a free port of 127.0.0.1; binding it here reserves the port for the store."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)
