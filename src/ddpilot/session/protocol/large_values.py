# SPDX-License-Identifier: Apache-2.0
"""Send large values between the parent and a rank as memory files, whose descriptors are passed over a Unix socket.

Kernel messages are copied several times on their way; a memory file is written once and mapped by the reader.
"""

from __future__ import annotations

import socket
from pathlib import Path

from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private

_LIMIT_S = 60.0


class ParcelPort:
    """The rank's end: listens at `path` and accepts a connection only when a request announces a parcel."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(_LIMIT_S)

    def take(self, token: str) -> tuple[socket.socket, int | None]:
        """Return the connection and the parcel, if any, sent with `token`. Those of interrupted requests are closed."""
        while True:
            channel, _ = self._listener.accept()
            channel.settimeout(_LIMIT_S)
            try:
                found, fds = fd_socket.receive(channel)
            except fd_socket.Closed:
                channel.close()
                continue
            if found == token:
                return channel, fds[0] if fds else None
            fd_socket.close_all(fds)
            channel.close()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class ParcelCall:
    """The parent's end for one request. Sends the parcel on construction; `answer` reads the reply."""

    def __init__(self, path: Path, token: str, parcel: int | None) -> None:
        self._channel = socket.socket(socket.AF_UNIX)
        try:
            self._channel.connect(str(path))
            fd_socket.send(self._channel, token, [] if parcel is None else [parcel])
        except BaseException:
            self._channel.close()
            raise

    def answer(self) -> memoryview | None:
        """Return the parcel of the reply, mapped privately, or None if the rank sent none.

        Call it once the rank has reported that it is done. The reply is sent before that report: if there is none, the
        rank was interrupted before it could send one.
        """
        self._channel.setblocking(False)
        try:
            _, fds = fd_socket.receive(self._channel)
        except fd_socket.Closed:
            return None
        try:
            return map_private(fds[0]) if fds else None
        finally:
            fd_socket.close_all(fds)

    def close(self) -> None:
        """Close the connection without reading a reply."""
        self._channel.close()
