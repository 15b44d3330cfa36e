# SPDX-License-Identifier: Apache-2.0
"""Large values between the parent and a rank: memory files whose descriptors go through a socket of the session.

The messages of a kernel are copied several times on their way; a memory file is written once and mapped by the reader.
"""

from __future__ import annotations

import socket
from pathlib import Path

from ddpilot.launching.local import wire

_LIMIT_S = 60.0


class ParcelPort:
    """The rank's end: it listens at `path`, and looks only when a request says that a parcel waits."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(_LIMIT_S)

    def take(self, token: str) -> tuple[socket.socket, list[int]]:
        """The connection and the descriptors that came under `token`; those of requests that were cut short go."""
        while True:
            channel, _ = self._listener.accept()
            channel.settimeout(_LIMIT_S)
            try:
                found, fds = wire.receive(channel)
            except wire.Closed:
                channel.close()
                continue
            if found == token:
                return channel, fds
            wire.close_all(fds)
            channel.close()

    def close(self) -> None:
        """Take no more."""
        self._listener.close()


class ParcelCall:
    """The parent's end of one request: give the rank a parcel now, take its answer when the request is over."""

    def __init__(self, path: Path, token: str, fds: list[int]) -> None:
        self._channel = socket.socket(socket.AF_UNIX)
        try:
            self._channel.connect(str(path))
            wire.send(self._channel, token, fds)
        except BaseException:
            self._channel.close()
            raise

    def answer(self) -> list[int]:
        """The descriptors of the answer of a rank that has said that it is done, which the caller owns.

        It was sent before that: where there is none now, the rank was interrupted before it could give any.
        """
        self._channel.setblocking(False)
        try:
            _, fds = wire.receive(self._channel)
        except wire.Closed:
            return []
        return fds

    def close(self) -> None:
        """Forget about the answer."""
        self._channel.close()
