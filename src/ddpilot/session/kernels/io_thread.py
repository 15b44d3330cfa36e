# SPDX-License-Identifier: Apache-2.0
"""The I/O thread of a session: owns all its sockets and pipes, so that nothing is lost while no cell runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hmac
import math
import os
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq
from jupyter_client.session import DELIM
from jupyter_client.session import Session as Messages

from ddpilot.session.kernels.event_router import Event, KernelMessage
from ddpilot.session.kernels.sockets import Connection
from ddpilot.session.protocol.messages import REPORT_KEY

_LONGEST_WAIT_S = 1.0
_Result = TypeVar("_Result")


class KernelChannels(ABC):
    """Signs messages to one kernel, and checks those that it sends. Not thread-safe, except for `make`."""

    def __init__(self, rank: int, key: bytes) -> None:
        self.rank = rank
        self._messages = Messages(key=key, signature_scheme="hmac-sha256")
        self.sockets: dict[str, zmq.Socket[Any]] = {}
        """Sockets of this process; empty if messages take a different way."""

    def make(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None, parent: Any = None
    ) -> dict[str, Any]:
        """Return a message to be passed to `send`; its id is `["header"]["msg_id"]`."""
        return dict(self._messages.msg(kind, content=content, parent=parent, metadata=metadata))

    @abstractmethod
    def send(self, channel: str, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Send a message created by `make`."""

    def decode(self, channel: str, frames: list[bytes]) -> KernelMessage:
        """Return the message in `frames`. Raises ValueError if its signature is wrong.

        `Session.recv` would also parse the dates in each message, which takes half of its time.
        """
        messages = self._messages
        signature, *parts = frames[frames.index(DELIM) + 1 :]
        if not hmac.compare_digest(signature, messages.sign(parts[:4])):
            raise ValueError(f"rank {self.rank} sent a message with a wrong signature")
        header, parent, metadata, content = map(messages.unpack, parts[:4])
        return KernelMessage(
            rank=self.rank,
            channel=channel,
            kind=header["msg_type"],
            parent_id=parent.get("msg_id", ""),
            content=content,
            metadata=metadata,
            buffers=parts[4:],
            header=header,
        )

    def close(self) -> None:
        """Close the sockets. Unsent messages are dropped."""
        for sock in self.sockets.values():
            sock.close()


class RelayedChannels(KernelChannels):
    """Channels to a kernel on a different machine, whose messages `send_frames(rank, channel, frames)` passes on.

    `offset_s`: what the monotonic clock of that machine is ahead of this one's.
    """

    def __init__(
        self, rank: int, key: bytes, send_frames: Callable[[int, str, list[bytes]], None], offset_s: float
    ) -> None:
        super().__init__(rank, key)
        self._send_frames = send_frames
        self._offset_s = offset_s

    def send(self, channel: str, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Send a message created by `make`."""
        self._send_frames(self.rank, channel, [*self._messages.serialize(message), *(buffers or ())])

    def decode(self, channel: str, frames: list[bytes]) -> KernelMessage:
        """Return the message in `frames`, with the time of an error on this machine's clock."""
        message = super().decode(channel, frames)
        raised = (message.content.get(REPORT_KEY) or {}).get("raised")
        if raised is not None:
            raised["time_s"] -= self._offset_s
        return message


class Channels(KernelChannels):
    """Sockets to one kernel on this machine."""

    def __init__(self, context: zmq.Context[Any], rank: int, connection: Connection) -> None:
        super().__init__(rank, connection.key)
        self.sockets = connection.open_sockets(context)

    def send(self, channel: str, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Send a message created by `make`."""
        self._messages.send(self.sockets[channel], message, buffers=[*(buffers or ())])

    def receive(self, channel: str) -> Iterator[KernelMessage]:
        """Yield the messages that have arrived on a channel, without blocking."""
        sock = self.sockets[channel]
        while True:
            try:
                frames: list[bytes] = sock.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            yield self.decode(channel, frames)


class IOThread:
    """Sends and receives in a thread of its own, which calls `deliver` with every event.

    `tick` is also called in that thread, after each poll, with the time (seconds, monotonic clock); it returns when to
    call it next, or None. `broken` is called with an exception that ended the thread.
    """

    def __init__(
        self,
        deliver: Callable[[Event], None],
        tick: Callable[[float], float | None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._deliver = deliver
        self._tick = tick
        self._broken = broken
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._ready: dict[Any, Callable[[], object]] = {}
        self._channels: dict[int, KernelChannels] = {}
        self._callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._stopping = False
        self.is_broken = False
        """True if an exception ended the thread."""
        self.watch(self._woken.fileno(), self._run_callbacks)
        self._thread = threading.Thread(target=self._run, name="ddpilot-session", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # callable from any thread

    def post(self, callback: Callable[[], None]) -> None:
        """Schedule `callback` to run in the I/O thread."""
        self._callbacks.put(callback)
        try:
            self._waker.send(b"x")
        except (BlockingIOError, OSError):  # the thread is being woken already, or has ended
            return

    def call(self, callback: Callable[[], _Result]) -> _Result:
        """Run `callback` in the I/O thread; return its result or raise its exception."""
        if threading.current_thread() is self._thread:
            return callback()
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(callback())
            except BaseException as error:  # noqa: BLE001  # raised in the calling thread
                future.set_exception(error)

        self.post(run)
        while not future.done():
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:  # a different class than TimeoutError on Python 3.10
                if not self._thread.is_alive() and not future.done():
                    raise RuntimeError("the session's thread has ended") from None
        return future.result()

    def send(
        self,
        ranks: Sequence[int],
        channel: str,
        kind: str,
        content: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        parent: dict[str, Any] | None = None,
        buffers: list[bytes] | None = None,
    ) -> dict[int, str]:
        """Send a message to the kernels of `ranks` and return its ids by rank: "" for a rank that is not connected."""
        connected = [channels for rank in ranks if (channels := self._channels.get(rank)) is not None]
        messages = {channels: channels.make(kind, content, metadata, parent) for channels in connected}

        def send() -> None:
            for channels, message in messages.items():
                if self._channels.get(channels.rank) is channels:
                    channels.send(channel, message, buffers)

        self.post(send)
        ids = {channels.rank: str(message["header"]["msg_id"]) for channels, message in messages.items()}
        return dict.fromkeys(ranks, "") | ids

    def stop(self) -> None:
        """Stop the thread and close all sockets."""
        if self._thread.is_alive():
            self.post(self._stop)
            self._thread.join()
        else:
            self._close()

    # callable from the I/O thread, or before it is started

    def connect(self, rank: int, connection: Connection) -> None:
        """Open the sockets to a rank's kernel, replacing those to an earlier one."""
        self.disconnect(rank)
        channels = Channels(self._context, rank, connection)
        self._channels[rank] = channels
        for name, sock in channels.sockets.items():
            self.watch(sock, functools.partial(self._receive, channels, name))

    def connect_relayed(self, channels: RelayedChannels) -> None:
        """Use `channels` for the kernel of their rank; `receive_frames` takes what it sends."""
        self.disconnect(channels.rank)
        self._channels[channels.rank] = channels

    def receive_frames(self, rank: int, channel: str, frames: list[bytes]) -> None:
        """Deliver a message of a kernel on a different machine; dropped if it is of an earlier kernel of the rank."""
        channels = self._channels.get(rank)
        if channels is not None:
            with contextlib.suppress(ValueError):  # signed with the key of an earlier kernel
                self._deliver(channels.decode(channel, frames))

    def disconnect(self, rank: int) -> None:
        """Deliver the messages that a kernel has already sent, then close the sockets to it."""
        channels = self._channels.pop(rank, None)
        if channels is None:
            return
        if isinstance(channels, Channels):
            for name, sock in channels.sockets.items():
                self._receive(channels, name)
                self.unwatch(sock)
        channels.close()

    def watch(self, source: Any, ready: Callable[[], object]) -> None:
        """Call `ready` whenever `source` (a file descriptor or a ZeroMQ socket) is readable."""
        self._ready[source] = ready
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Any) -> None:
        """Stop watching `source`."""
        if self._ready.pop(source, None) is not None:
            self._poller.unregister(source)

    def emit(self, event: Event) -> None:
        """Deliver an event."""
        self._deliver(event)

    def _run(self) -> None:
        try:
            due: float | None = None
            while not self._stopping:
                wait_s = _LONGEST_WAIT_S if due is None else min(_LONGEST_WAIT_S, max(0.0, due - time.monotonic()))
                for source, _ in self._poller.poll(math.ceil(wait_s * 1000)):
                    ready = self._ready.get(source)
                    if ready is not None:  # an earlier callback of this poll may have closed it
                        ready()
                due = self._tick(time.monotonic())
        except BaseException as error:  # noqa: BLE001  # nothing else would report it
            self.is_broken = True
            self._broken(error)
        finally:
            self._close()

    def _receive(self, channels: Channels, name: str) -> None:
        for message in channels.receive(name):
            self._deliver(message)

    def _run_callbacks(self) -> None:
        os.read(self._woken.fileno(), 4096)
        while True:
            try:
                callback = self._callbacks.get_nowait()
            except queue.Empty:
                return
            callback()

    def _stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        for channels in self._channels.values():
            channels.close()
        self._channels.clear()
        self._waker.close()
        self._woken.close()
        self._context.term()
