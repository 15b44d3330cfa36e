# SPDX-License-Identifier: Apache-2.0
"""`Link`: messages over the one connection between the parent and a node's host process; both ends use it.

A frame is 8 bytes (length of the body, in network byte order) and a pickled body; an empty body is a sign of life. The
stream below has authenticated both ends before the first frame is read, as unpickling may execute anything.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

_HEADER = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 18
_ALIVE_EVERY_S = 1.0
_POLL_S = 0.2


class Stream(Protocol):
    """A connection of bytes. `read` and `write` are called in one thread each."""

    def read(self, limit_s: float) -> bytes | None:
        """Return the next bytes, b"" at the end; None if none arrived in `limit_s` seconds. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Write all of `data`. Raises OSError."""

    def close(self) -> None:
        """Close the connection."""


class PipeStream:
    """The two pipes of a process at the other end: ssh, or the shell that ssh has started."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)

    def read(self, limit_s: float) -> bytes | None:
        """Return the next bytes, as `Stream.read`."""
        return os.read(self._reader, _CHUNK_BYTES) if self._poll.poll(limit_s * 1000) else None

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._writer, view) :]

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._writer)
        os.close(self._reader)


class Link:
    """Sends and receives messages in two threads, so that neither end waits for the other to read.

    `fileno()` is readable while there are messages to `take`. The link is `lost` once the stream has ended, or has been
    silent for `silence_s` seconds.
    """

    def __init__(self, stream: Stream, *, silence_s: float, received: bytes = b"") -> None:
        self._stream = stream
        self._silence_s = silence_s
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._buffer = bytearray(received)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self.lost = ""
        """Why the link ended, as a predicate such as "closed its connection"; "" while it is open."""
        self.num_unsent_bytes = 0
        """Bytes that wait to be sent."""
        self._counting = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"ddpilot-link-{name}", daemon=True)
            for name, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """File descriptor that is readable while messages wait, or once the link is lost."""
        return self._woken.fileno()

    def send(self, message: Any) -> None:
        """Send a message. Does nothing on a lost link."""
        if not self.lost:
            data = pickle.dumps(message, protocol=5)
            self._put(_HEADER.pack(len(data)) + data)

    def take(self) -> Iterator[Any]:
        """Yield the messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while True:
            try:
                yield self._incoming.get_nowait()
            except queue.Empty:
                return

    def wait(self, limit_s: float) -> Any:
        """Return the next message; None if the link is lost first. Raises TimeoutError after `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                return self._incoming.get(timeout=0.05)
            except queue.Empty:
                if self.lost and self._incoming.empty():
                    return None
                if time.monotonic() > deadline_s:
                    raise TimeoutError from None

    def close(self, *, limit_s: float = 2.0) -> None:
        """Send what waits to be sent, for at most `limit_s` seconds, and close the stream."""
        self._outgoing.put(None)
        reader, writer = self._threads
        writer.join(limit_s)
        self.lost = self.lost or "was closed"
        reader.join(limit_s)
        with contextlib.suppress(OSError):
            self._stream.close()
        writer.join(limit_s)
        self._waker.close()
        self._woken.close()

    def _put(self, data: bytes) -> None:
        with self._counting:
            self.num_unsent_bytes += len(data)
        self._outgoing.put(data)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is being woken already
            self._waker.send(b"x")

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._wake()

    def _read(self) -> None:
        silent_s = 0.0
        try:
            self._take_frames()
            while not self.lost:
                began_s = time.monotonic()
                data = self._stream.read(_POLL_S)
                if data == b"":
                    self._lose("closed its connection")
                elif data:
                    silent_s = 0.0
                    self._buffer += data
                    self._take_frames()
                else:
                    # Not more than the wait was meant to take: this process may have been suspended.
                    silent_s += min(time.monotonic() - began_s, 2 * _POLL_S)
                    if silent_s > self._silence_s:
                        self._lose(f"has been silent for {self._silence_s:g} s")
        except Exception as error:  # noqa: BLE001  # whatever ends this thread ends the link, which is reported
            self._lose(f"broke its connection ({error})")

    def _take_frames(self) -> None:
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            if length:
                self._incoming.put(pickle.loads(memoryview(self._buffer)[_HEADER.size : end].tobytes()))
                self._wake()
            del self._buffer[:end]

    def _write(self) -> None:
        try:
            while not self.lost:
                try:
                    data = self._outgoing.get(timeout=_ALIVE_EVERY_S)
                except queue.Empty:
                    data = _HEADER.pack(0)
                    self._stream.write(data)
                    continue
                if data is None:
                    return
                self._stream.write(data)
                with self._counting:
                    self.num_unsent_bytes -= len(data)
        except (OSError, ValueError) as error:
            self._lose(f"broke its connection ({error})")
