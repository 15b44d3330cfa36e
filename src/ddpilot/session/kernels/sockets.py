# SPDX-License-Identifier: Apache-2.0
"""`Connection`: the address of a kernel and the sockets to it. Does not import jupyter_client, as hosts use it too."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

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

    def open_sockets(self, context: zmq.Context[Any]) -> dict[str, zmq.Socket[Any]]:
        """Return a connected socket for each channel."""
        identity = os.urandom(16).hex().encode()
        sockets: dict[str, zmq.Socket[Any]] = {}
        for channel, kind in _KINDS.items():
            sock = sockets[channel] = context.socket(kind)
            sock.linger = 0
            sock.set_hwm(0)  # no limit: output must not be dropped while a rank prints fast
            if kind == zmq.SUB:
                sock.subscribe(b"")
            else:
                sock.identity = identity
            sock.connect(self.url(channel))
        return sockets
