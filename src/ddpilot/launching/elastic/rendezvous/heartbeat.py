# SPDX-License-Identifier: Apache-2.0
"""Heartbeat thread: exchanges the nodes' states through node 0's store.

It has its own thread and connection, because a call on a broken connection may never return, and the main thread of the
agent must not block on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpilot.launching.elastic.rendezvous.mailbox import Post
from ddpilot.launching.elastic.rendezvous.node_state import NodeState, View, decode_state

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE_S = 0.5
"""Seconds between two heartbeats."""

_BUSY_PULSE_S = 0.1
"""Seconds between two heartbeats while letters are being exchanged."""

_NEWS_S = 0.05
_DEAD_S = 3.0
"""Seconds without an answer from the store after which it is considered dead, and `flush` does not wait for it."""


class Peers:
    """`connect` opens the connection, in the thread; `me` is the first state to publish, repeated every `pulse_s`."""

    def __init__(self, connect: Callable[[], Store], me: NodeState, pulse_s: float = PULSE_S) -> None:
        self._connect = connect
        self._pulse_s = pulse_s
        self._me = me
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._states: dict[int, NodeState] = {me.node_rank: me}
        self._seen_s: dict[int, float] = {}
        self._heard_s = time.monotonic()
        self._told_beat = -1
        self._link_error: Exception | None = None
        self._stopping = False
        self._post: Post | None = None
        self._thread = threading.Thread(target=self._run, name="ddpilot-peers", daemon=True)
        self._thread.start()

    @property
    def me(self) -> NodeState:
        """The state that this node publishes."""
        with self._lock:
            return self._me

    def tell(self, change: Callable[[NodeState], NodeState]) -> None:
        """Update the state of this node and publish it now."""
        with self._lock:
            self._me = change(self._me)
        self._wake.set()

    def open_post(self, attempt: int) -> Post:
        """Start exchanging messages of this attempt, instead of those of an earlier one."""
        post = Post(self.me, attempt, self._wake.set)
        with self._lock:
            self._post = post
        return post

    def view(self) -> View:
        """What is known about the other nodes now."""
        now = time.monotonic()
        with self._lock:
            link_s = now - self._heard_s
            # If node 0's store does not answer, other nodes cannot be heard either: only node 0 counts as silent then.
            behind = 0.0 if self._me.node_rank == 0 else link_s
            silent_s = {node: max(0.0, now - seen_s - behind) for node, seen_s in self._seen_s.items()}
            if self._me.node_rank != 0 and 0 in self._seen_s:
                silent_s[0] = max(link_s, silent_s[0])
            return View(states=dict(self._states), silent_s=silent_s, link_error=self._link_error)

    def flush(self, limit_s: float) -> None:
        """Wait until the last update has reached the store, at most `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        with self._lock:
            before = self._told_beat
        self._wake.set()
        while time.monotonic() < deadline_s and not self._is_dead():
            with self._lock:
                if self._told_beat >= before + 2:  # the exchange in progress at the call may have missed the update
                    return
            self._wake.set()
            time.sleep(_NEWS_S)

    def _is_dead(self) -> bool:
        with self._lock:
            return self._link_error is not None or time.monotonic() - self._heard_s > _DEAD_S

    def stop(self, limit_s: float = 1.0) -> None:
        """Stop the thread. If it is stuck on a dead connection, it is left running until the process exits."""
        self._stopping = True
        self._wake.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._stopping:
                post = self._exchange(store)
                self._wake.wait(_BUSY_PULSE_S if post is not None and post.is_busy else self._pulse_s)
                self._wake.clear()
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            with self._lock:
                self._link_error, post = error, self._post
            if post is not None:
                post.break_off(error)

    def _exchange(self, store: Store) -> Post | None:
        with self._lock:
            post = self._post
        num_letters, num_pieces = post.send(store) if post is not None else (0, 0)
        with self._lock:
            is_open = post is not None and post.attempt == self._me.attempt
            letter, num_pieces = (num_letters, num_pieces) if is_open else (0, 0)
            self._me = replace(self._me, beat=self._me.beat + 1, letter=letter, num_pieces=num_pieces)
            mine, known = self._me, set(self._states)
        store.set(_key(mine.node_rank), mine.encode())
        missing = [node for node in range(mine.nnodes) if node not in known]
        came = {node for node in missing if store.check([_key(node)])}
        asked = sorted((known | came) - {mine.node_rank})
        asked_ns = time.monotonic_ns()
        found = [decode_state(text) for text in store.multi_get([_key(node) for node in asked])] if asked else []
        now = time.monotonic()
        with self._lock:
            self._heard_s, self._told_beat = now, mine.beat
            self._states[mine.node_rank] = mine
            for state in found:
                if state.node_rank not in self._states or state.beat != self._states[state.node_rank].beat:
                    self._seen_s[state.node_rank] = now
                self._states[state.node_rank] = state
        if post is not None:
            post.fetch(store, found, asked_ns)
        return post


def _key(node_rank: int) -> str:
    return f"node/{node_rank}"
