# SPDX-License-Identifier: Apache-2.0
"""`KernelRelay`: passes messages and parcels between kernels and the link; `HostLoop`: waits for both."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zmq

from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import MemoryWriter
from ddpilot.session.kernels.sockets import Connection
from ddpilot.session.nodes.messages import KernelFrames, ParcelAnswer, SendParcel
from ddpilot.session.protocol.large_values import ParcelCall

_FULL_PAUSE_S = 0.005


class HostLoop:
    """The event loop of a host process.

    `tick` is called every `interval_s` seconds. While `is_full` returns True, only sources that were watched with
    `always` are read, so that a rank that prints faster than the connection is slowed down.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float, is_full: Callable[[], bool]) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._is_full = is_full
        self._poller = zmq.Poller()
        self._ready: dict[Any, Callable[[], object]] = {}
        self._always: set[Any] = set()
        self._is_stopping = False

    def watch(self, source: Any, ready: Callable[[], object], *, always: bool = False) -> None:
        """Call `ready` whenever `source` (a file descriptor or a ZeroMQ socket) is readable."""
        self._ready[source] = ready
        self._poller.register(source, zmq.POLLIN)
        if always:
            self._always.add(source)

    def unwatch(self, source: Any) -> None:
        """Stop watching `source`, if it is watched."""
        self._always.discard(source)
        if self._ready.pop(source, None) is not None:
            self._poller.unregister(source)

    def stop(self) -> None:
        """Return from `run` after the current callback."""
        self._is_stopping = True

    def run(self) -> None:
        """Run until `stop`."""
        due_s = time.monotonic()
        while not self._is_stopping:
            now = time.monotonic()
            if now >= due_s:
                self._tick()
                due_s = now + self._interval_s
            is_full = self._is_full()
            events = self._poller.poll(max(1, int((due_s - now) * 1000)))
            if is_full:
                events = [event for event in events if event[0] in self._always]
                time.sleep(_FULL_PAUSE_S)
            for source, _ in events:
                ready = self._ready.get(source)
                if ready is not None and not self._is_stopping:
                    ready()


class KernelRelay:
    """The sockets to the kernels of this node, in `folder`, which no other user can enter.

    `before(rank, channel)` is called before messages of a kernel are passed to `send`.
    """

    def __init__(
        self, loop: HostLoop, folder: Path, send: Callable[[Any], None], before: Callable[[int, str], None]
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._send = send
        self._before = before
        self._context: zmq.Context[Any] = zmq.Context()
        self._starting: dict[int, tuple[Connection, list[KernelFrames]]] = {}
        """Kernels whose process was not started yet, with the messages for them."""
        self._sockets: dict[int, dict[str, zmq.Socket[Any]]] = {}
        self._stems: dict[int, str] = {}
        self._calls: dict[tuple[str, int], ParcelCall] = {}

    def prepare(self, rank: int, stem: str, key: bytes) -> None:
        """Write the kernel's connection file. Messages for it wait until `connect`."""
        self.disconnect(rank)
        connection = Connection(str(self._folder / stem), key)
        connection.write(self._folder / f"{stem}.json")
        self._stems[rank] = stem
        self._starting[rank] = connection, []

    def connect(self, rank: int) -> None:
        """Open the sockets to the kernel, whose process was started.

        Before that each socket would try to connect ten times per second while the rank server imports torch.
        """
        connection, waiting = self._starting.pop(rank)
        sockets = self._sockets[rank] = connection.open_sockets(self._context)
        for name, sock in sockets.items():
            self._loop.watch(sock, functools.partial(self._receive, sock, rank, name))
        for message in waiting:
            self.send(message)

    def disconnect(self, rank: int) -> None:
        """Pass on what the kernel has sent, then close the sockets to it."""
        self._starting.pop(rank, None)
        for name, sock in self._sockets.pop(rank, {}).items():
            self._receive(sock, rank, name)
            self._loop.unwatch(sock)
            sock.close()
        for key in [key for key in self._calls if key[1] == rank]:
            self._calls.pop(key).close()

    def send(self, message: KernelFrames) -> None:
        """Send the frames to the kernel, unless it has ended."""
        if message.rank in self._starting:
            self._starting[message.rank][1].append(message)
        elif message.rank in self._sockets:
            self._sockets[message.rank][message.channel].send_multipart(message.frames)

    def send_parcel(self, request: SendParcel) -> None:
        """Open the parcel's socket of each rank and send the parcel there."""
        fd = None if request.data is None else _write_memory_file(request.data)
        try:
            for rank in request.ranks:
                if rank in self._stems:
                    with contextlib.suppress(OSError, fd_socket.Closed):  # the rank is dead, which is reported
                        path = self._folder / f"{self._stems[rank]}.parcels"
                        self._calls[request.token, rank] = ParcelCall(path, request.token, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def close_parcel(self, token: str) -> None:
        """Close the sockets of a request."""
        for key in [key for key in self._calls if key[0] == token]:
            self._calls.pop(key).close()

    def close(self, ranks: Iterable[int]) -> None:
        """Close all sockets."""
        for rank in ranks:
            self.disconnect(rank)
        self._context.destroy(linger=0)

    def _receive(self, sock: zmq.Socket[Any], rank: int, name: str) -> None:
        is_first = True
        while True:
            try:
                frames: list[bytes] = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if is_first:
                self._before(rank, name)
                is_first = False
            if name == "shell":
                self._answer_parcels(rank)
            self._send(KernelFrames(rank, name, frames))

    def _answer_parcels(self, rank: int) -> None:
        """Send the parcels that the rank has replied with: it does so before it reports."""
        for token, other in list(self._calls):
            if other != rank:
                continue
            call = self._calls[token, rank]
            answer = call.answer()
            if answer is not None:
                self._send(ParcelAnswer(token, rank, bytes(answer)))
                self._calls.pop((token, rank)).close()


def _write_memory_file(data: bytes) -> int:
    writer = MemoryWriter("ddpilot-parcel")
    try:
        writer.write(data)
        return writer.seal()
    finally:
        writer.close()
