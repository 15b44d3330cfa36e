# SPDX-License-Identifier: Apache-2.0
"""Nodes connect to each other on a free port, compare their clocks, and look for a file of node 0."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

_TIME = struct.Struct("!d")
_TRIES = 3


@dataclass(frozen=True)
class Reply:
    """Another node's clock minus this one's, in seconds, and how far that can be off."""

    offset_s: float
    error_s: float


class ClockServer:
    """Answers every connection with the time of this node, on a free port of `address`, until it is closed."""

    def __init__(self, address: str) -> None:
        self._sock = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = int(self._sock.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="ddpilot-clock", daemon=True)
        self._thread.start()

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._sock.accept()
                with suppress(OSError), connection:
                    connection.settimeout(1.0)
                    while connection.recv(1):
                        connection.sendall(_TIME.pack(time.time()))


def ask_clock(address: str, port: int, timeout_s: float) -> Reply:
    """Ask the `ClockServer` at `address`:`port`. Raises OSError if it cannot be reached within `timeout_s` seconds."""
    replies = []
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        for _ in range(_TRIES):
            sent_s = time.time()
            connection.sendall(b"?")
            answer = b""
            while len(answer) < _TIME.size:
                piece = connection.recv(_TIME.size - len(answer))
                if not piece:
                    raise ConnectionResetError("the other node closed the connection")
                answer += piece
            received_s = time.time()
            theirs_s = _TIME.unpack(answer)[0]
            replies.append(Reply(theirs_s - (sent_s + received_s) / 2, (received_s - sent_s) / 2))
    return min(replies, key=lambda reply: reply.error_s)
