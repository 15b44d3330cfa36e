# SPDX-License-Identifier: Apache-2.0
"""The parent's ZeroMQ sockets to the kernel of one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session as Messages
from jupyter_client.session import new_id_bytes

from ddpilot.session.kernels.events import Said

_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
_KINDS = {"shell": zmq.DEALER, "iopub": zmq.SUB, "stdin": zmq.DEALER, "control": zmq.DEALER}


@dataclass(frozen=True)
class Connection:
    """The address of a kernel and the key that signs its messages."""

    address: str
    """Common prefix of the paths of its Unix sockets."""

    key: bytes

    def url(self, channel: str) -> str:
        """Return the ZeroMQ address of one channel."""
        return f"ipc://{self.address}-{_PORTS[channel]}"

    def write(self, path: Path) -> None:
        """Write the kernel's connection file, with mode 0600. Raises FileExistsError if it exists."""
        content: dict[str, Any] = {f"{channel}_port": port for channel, port in _PORTS.items()}
        content |= {"transport": "ipc", "ip": self.address, "key": self.key.decode(), "signature_scheme": "hmac-sha256"}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(content, file)


class Channels:
    """Sockets to one kernel. Not thread-safe, except for `make`."""

    def __init__(self, context: zmq.Context[Any], rank: int, connection: Connection) -> None:
        self.rank = rank
        self._messages = Messages(key=connection.key, signature_scheme="hmac-sha256")
        self.sockets: dict[str, zmq.Socket[Any]] = {}
        identity = new_id_bytes()
        for channel, kind in _KINDS.items():
            sock = context.socket(kind)
            sock.linger = 0
            sock.set_hwm(0)  # no limit: output must not be dropped while a rank prints fast
            if kind == zmq.SUB:
                sock.subscribe(b"")
            else:
                sock.identity = identity
            sock.connect(connection.url(channel))
            self.sockets[channel] = sock

    def make(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None, parent: Any = None
    ) -> dict[str, Any]:
        """Return a message to be passed to `send`; its id is `["header"]["msg_id"]`."""
        return dict(self._messages.msg(kind, content=content, parent=parent, metadata=metadata))

    def send(self, channel: str, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Send a message created by `make`."""
        self._messages.send(self.sockets[channel], message, buffers=[*(buffers or ())])

    def receive(self, channel: str) -> Iterator[Said]:
        """Yield the messages that have arrived on a channel, without blocking."""
        sock = self.sockets[channel]
        while True:
            try:
                _, message = self._messages.recv(sock, mode=zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            if message is None:
                return
            yield Said(
                rank=self.rank,
                channel=channel,
                kind=message["header"]["msg_type"],
                parent_id=message["parent_header"].get("msg_id", ""),
                content=message["content"],
                metadata=message["metadata"],
                buffers=[bytes(buffer) for buffer in message["buffers"]],
                header=message["header"],
            )

    def close(self) -> None:
        """Close the sockets. Unsent messages are dropped."""
        for sock in self.sockets.values():
            sock.close()
