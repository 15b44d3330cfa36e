# SPDX-License-Identifier: Apache-2.0
"""Measurements over a group: the clocks of its nodes, and the time of an all_reduce. Imports torch only for that."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TIME = struct.Struct("!d")
_NUM_TRIES = 3


@dataclass(frozen=True)
class Reply:
    """Another node's clock minus this one's, in seconds, and how far that can be off."""

    offset_s: float
    error_s: float
    asked_s: float = 0.0
    """Time of this node's clock in the middle of the round trip."""


class ClockServer:
    """Answers every byte on a connection with the time of this node, on a free port of `address`, until it is closed.

    `address`: "" for all addresses. `clock`: returns seconds, by default of the wall clock.
    """

    def __init__(self, address: str, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: time.time())
        self._sock = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = int(self._sock.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="ddpilot-clock", daemon=True)
        self._thread.start()

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering."""
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
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    while connection.recv(1):
                        connection.sendall(_TIME.pack(self._clock()))


def ask_clock(
    address: str,
    port: int,
    timeout_s: float,
    *,
    clock: Callable[[], float] | None = None,
    num_tries: int = _NUM_TRIES,
) -> Reply:
    """Ask the `ClockServer` at `address`:`port`. Raises OSError if it cannot be reached within `timeout_s` seconds.

    `clock`: of this node, the same kind as the server's.
    """
    now = clock or (lambda: time.time())
    replies = []
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_tries):
            sent_s = now()
            connection.sendall(b"?")
            answer = b""
            while len(answer) < _TIME.size:
                piece = connection.recv(_TIME.size - len(answer))
                if not piece:
                    raise ConnectionResetError("the other node closed the connection")
                answer += piece
            received_s = now()
            theirs_s, middle_s = _TIME.unpack(answer)[0], (sent_s + received_s) / 2
            replies.append(Reply(theirs_s - middle_s, (received_s - sent_s) / 2, middle_s))
    return min(replies, key=lambda reply: reply.error_s)


_MANY, _FEW = 20, 5
"""Number of times that a small and a large message is measured."""
_SMALL_BYTES = 1_000_000


def time_calls(call: Callable[[], object], device: torch.device, num_bytes: int) -> list[float]:
    """Return the seconds of each of some calls, after one that is not counted."""
    import torch

    times_s = []
    for _ in range(1 + (_MANY if num_bytes <= _SMALL_BYTES else _FEW)):
        began_s = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return times_s[1:]


def time_all_reduce(process_group: Any, device: torch.device, sizes: Sequence[int]) -> list[list[float]]:
    """Return the seconds of some all_reduces in `process_group` for each of `sizes`, in bytes. Collective.

    The group is called directly, so that what observes `torch.distributed` does not take them for the program's.
    """
    import torch

    found = []
    for num_bytes in sizes:
        tensor = torch.zeros(max(1, num_bytes // 4), device=device)
        found.append(time_calls(lambda tensor=tensor: process_group.allreduce([tensor]).wait(), device, num_bytes))  # type: ignore[misc]
    return found
