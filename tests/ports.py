# SPDX-License-Identifier: Apache-2.0
"""Ports for what a test starts, which nobody else is given in the meantime."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def bound_socket() -> socket.socket:
    """A socket that keeps a loopback port: bound with SO_REUSEADDR, and not listening.

    It lets a server in that asks for the port by its number, and keeps it from all who ask for any. A port that was
    only looked up may be another's a moment later: on Linux one in 14,000 for each socket that is bound to port 0
    meanwhile, and gloo binds several per rank.
    """
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper


@contextmanager
def kept_port() -> Iterator[int]:
    """A loopback port that is free to listen on, and nobody else's while the block runs."""
    with bound_socket() as keeper:
        yield keeper.getsockname()[1]
