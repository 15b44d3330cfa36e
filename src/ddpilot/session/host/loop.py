# SPDX-License-Identifier: Apache-2.0
"""`HostLoop`: waits for file descriptors and ZeroMQ sockets, and calls what is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

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
