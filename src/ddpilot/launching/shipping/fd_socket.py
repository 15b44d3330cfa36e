# SPDX-License-Identifier: Apache-2.0
"""Messages with file descriptors over a Unix stream socket, between processes of one launch.

A frame is 8 bytes (length of the body, number of descriptors; both in network byte order) and a pickled body. The
descriptors are attached to the first byte. Sockets come from `socket.socketpair` and are inherited: they have no
address, so no other process can connect.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

_HEADER = struct.Struct("!II")
_MAX_FDS = 16


class Closed(Exception):  # noqa: N818  # a state, not a failure
    """The other end was closed."""


def send(channel: socket.socket, body: Any, fds: Sequence[int] = ()) -> None:
    """Send one frame; `fds` stay open in this process. Raises Closed if the other end was closed."""
    data = pickle.dumps(body)
    if len(fds) > _MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors in one frame, at most {_MAX_FDS}")
    try:
        header = _HEADER.pack(len(data), len(fds))
        sent = socket.send_fds(channel, [header], list(fds)) if fds else 0
        channel.sendall(header[sent:] + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Receive a frame and its descriptors, which the caller must close. Raises Closed if the other end was closed.

    Blocks until a frame arrives; if `channel` is non-blocking, raises Closed if no frame is available. Raises OSError
    with EMFILE if the limit of open files of this process is reached.
    """
    fds: list[int] = []
    try:
        head = _receive_exactly(channel, _HEADER.size, fds)
        length, num_fds = _HEADER.unpack(head)
        body = pickle.loads(_receive_exactly(channel, length, fds))
        if len(fds) != num_fds:
            found = f"{num_fds} descriptors were sent and {len(fds)} came: the limit of open files is reached"
            raise OSError(errno.EMFILE, found)
    except BaseException as error:
        close_all(fds)
        if isinstance(error, (Closed, ConnectionResetError, BlockingIOError)):
            raise Closed from error
        raise
    return body, fds


def _receive_exactly(channel: socket.socket, size_bytes: int, fds: list[int]) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        data, received, _, _ = socket.recv_fds(channel, size_bytes - len(parts), _MAX_FDS)
        for fd in received:
            os.set_inheritable(fd, False)
        fds.extend(received)
        if not data:
            raise Closed
        parts += data
    return bytes(parts)


def close_all(fds: Iterable[int]) -> None:
    """Close the file descriptors."""
    for fd in fds:
        os.close(fd)
