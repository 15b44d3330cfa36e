# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: a thread exchanges the nodes' states through node 0's store, and a check detects silent nodes.

The thread has its own connection, because a call on a broken connection may never return, and the main thread of the
agent must not block on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpilot.errors import DdpilotError, RendezvousError
from ddpilot.launching.elastic.rendezvous.mailbox import StoreMailbox
from ddpilot.launching.elastic.rendezvous.node_state import READY, NodeState, NodesView, decode_state

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


PULSE_S = 0.5
"""Seconds between two heartbeats."""

_BUSY_PULSE_S = 0.1
"""Seconds between two heartbeats while letters are being exchanged."""

_NEWS_S = 0.05
_DEAD_S = 3.0
"""Seconds without an answer from the store after which it is considered dead, and `flush` does not wait for it."""


class Heartbeat:
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
        self._post: StoreMailbox | None = None
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

    def open_post(self, attempt: int) -> StoreMailbox:
        """Start exchanging messages of this attempt, instead of those of an earlier one."""
        post = StoreMailbox(self.me, attempt, self._wake.set)
        with self._lock:
            self._post = post
        return post

    def view(self) -> NodesView:
        """What is known about the other nodes now."""
        now = time.monotonic()
        with self._lock:
            link_s = now - self._heard_s
            # If node 0's store does not answer, other nodes cannot be heard either: only node 0 counts as silent then.
            behind = 0.0 if self._me.node_rank == 0 else link_s
            silent_s = {node: max(0.0, now - seen_s - behind) for node, seen_s in self._seen_s.items()}
            if self._me.node_rank != 0 and 0 in self._seen_s:
                silent_s[0] = max(link_s, silent_s[0])
            return NodesView(states=dict(self._states), silent_s=silent_s, link_error=self._link_error)

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

    def _exchange(self, store: Store) -> StoreMailbox | None:
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


SILENCE_S = 5.0
"""Seconds without a heartbeat after which a notice is shown."""


_TICK_S = 0.25
_STANDSTILL_S = 2.0
_CATCH_UP_S = 2.0
"""Seconds that this process takes, after it was suspended, to read what the other nodes wrote in the meantime."""


class Standstill:
    """Detects that this process itself was not running: stopped, on a suspended machine, or without CPU time."""

    def __init__(self) -> None:
        self._ticked_s = time.monotonic()
        self._stopping = threading.Event()
        self.length_s = 0.0
        """Duration in seconds of the last standstill."""
        self.ended_s = 0.0
        """End of the last standstill on the monotonic clock."""

    def start(self) -> None:
        """Start a thread that measures until `stop` is called."""
        self._ticked_s = time.monotonic()
        threading.Thread(target=self._run, name="ddpilot-standstill", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()

    def tick(self, now_s: float) -> None:
        """Record that this process is running at `now_s`."""
        gap_s, self._ticked_s = now_s - self._ticked_s, now_s
        if gap_s >= _STANDSTILL_S:
            self.length_s, self.ended_s = gap_s, now_s

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            self.tick(time.monotonic())


class LivenessCheck:
    """Checks successive views. `limit_s`: seconds without a heartbeat after which to raise; `say` shows a notice.

    `standstill`: of this process, which must catch up on what the other nodes have written before it judges them.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None], standstill: Standstill) -> None:
        self._limit_s = limit_s
        self._say = say
        self._standstill = standstill
        self._said_standstill_s = 0.0
        self._told: dict[int, float] = {}

    def look(self, view: NodesView) -> None:
        """Show new notices. Raises RendezvousError if the store is lost or a node is silent for too long."""
        if view.link_error is not None:
            raise _link_lost(view)
        now = time.monotonic()
        self._standstill.tick(now)
        if self._standstill.length_s and now - self._standstill.ended_s < _CATCH_UP_S:
            self._say_standstill()
            return
        for node, silent_s in sorted(view.silent_s.items()):
            state = view.states[node]
            if state.phase != READY:
                continue
            if silent_s >= self._limit_s:
                raise RendezvousError(
                    f"watching {state.place}",
                    found=f"no sign of it for {silent_s:.0f} s: the network between the nodes is cut, or that machine, "
                    "or `ddpilot run` on it, stands still",
                    fix="Look at that machine and at the link; --node-timeout is the silence that is allowed",
                )
            if silent_s >= min(SILENCE_S, self._limit_s / 2):
                if node not in self._told:
                    left_s = self._limit_s - silent_s
                    self._say(
                        f"no sign of {state.place} for {silent_s:.0f} s: is the network cut, or that machine down? "
                        f"Ranks here are ended in {left_s:.0f} s (--node-timeout {self._limit_s:g})"
                    )
                self._told[node] = silent_s
            elif node in self._told:
                self._say(f"{state.place} is back after {self._told.pop(node):.0f} s")

    def _say_standstill(self) -> None:
        if self._said_standstill_s != self._standstill.ended_s:
            self._said_standstill_s = self._standstill.ended_s
            self._say(
                f"`ddpilot run` on this node stood still for {self._standstill.length_s:.0f} s: "
                "was it stopped, or the machine suspended or out of CPU time?"
            )


def silent_nodes(view: NodesView, limit_s: float) -> list[NodeState]:
    """Nodes of `view` that have sent no heartbeat for `limit_s` seconds although their ranks run."""
    silent = [view.states[node] for node, silent_s in sorted(view.silent_s.items()) if silent_s >= limit_s]
    return [state for state in silent if state.phase == READY]


def _link_lost(view: NodesView) -> DdpilotError:
    error = view.link_error
    if isinstance(error, DdpilotError):
        return error
    place = view.states[0].place if 0 in view.states else "node 0"
    lost = RendezvousError(
        f"keeping in touch with {place}",
        found=f"its store has ended ({str(error).splitlines()[0]})",
        fix="Look at the output of `ddpilot run` there: it was killed, or that machine went down",
    )
    lost.__cause__ = error
    return lost
