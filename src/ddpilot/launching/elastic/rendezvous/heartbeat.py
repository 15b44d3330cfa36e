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
from ddpilot.launching.elastic.rendezvous.node_state import READY, NodeState, NodesView, StoreMailbox, decode_state

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


PULSE_S = 0.5
"""Seconds between two heartbeats."""

_BUSY_PULSE_S = 0.1
"""Seconds between two heartbeats while observers exchange messages."""

_FLUSH_PAUSE_S = 0.05
_DEAD_S = 3.0
"""Seconds without an answer from the store after which `flush` no longer waits for it."""


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
        self._answered_s = time.monotonic()
        self._sent_beat = -1
        self._link_error: Exception | None = None
        self._stopping = False
        self._mailbox: StoreMailbox | None = None
        self._thread = threading.Thread(target=self._run, name="ddpilot-heartbeat", daemon=True)
        self._thread.start()

    @property
    def me(self) -> NodeState:
        """The state that this node publishes."""
        with self._lock:
            return self._me

    def update(self, change: Callable[[NodeState], NodeState]) -> None:
        """Update the state of this node and publish it now."""
        with self._lock:
            self._me = change(self._me)
        self._wake.set()

    def open_mailbox(self, attempt: int) -> StoreMailbox:
        """Start exchanging messages of this attempt, instead of those of an earlier one."""
        mailbox = StoreMailbox(self.me, attempt, self._wake.set)
        with self._lock:
            self._mailbox = mailbox
        return mailbox

    def view(self) -> NodesView:
        """The current state of the other nodes, as far as it is known."""
        now = time.monotonic()
        with self._lock:
            link_s = now - self._answered_s
            # If node 0's store does not answer, no node can be reached: only node 0 counts as silent then.
            behind = 0.0 if self._me.node_rank == 0 else link_s
            silent_s = {node: max(0.0, now - seen_s - behind) for node, seen_s in self._seen_s.items()}
            if self._me.node_rank != 0 and 0 in self._seen_s:
                silent_s[0] = max(link_s, silent_s[0])
            return NodesView(states=dict(self._states), silent_s=silent_s, link_error=self._link_error)

    def flush(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds until the last update is in the store."""
        deadline_s = time.monotonic() + limit_s
        with self._lock:
            before = self._sent_beat
        self._wake.set()
        while time.monotonic() < deadline_s and not self._is_dead():
            with self._lock:
                if self._sent_beat >= before + 2:  # the exchange in progress at the call may have missed the update
                    return
            self._wake.set()
            time.sleep(_FLUSH_PAUSE_S)

    def _is_dead(self) -> bool:
        with self._lock:
            return self._link_error is not None or time.monotonic() - self._answered_s > _DEAD_S

    def stop(self) -> None:
        """Stop the thread. If it is stuck on a dead connection, it is left running until the process exits."""
        self._stopping = True
        self._wake.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._stopping:
                mailbox = self._exchange(store)
                self._wake.wait(_BUSY_PULSE_S if mailbox is not None and mailbox.is_busy else self._pulse_s)
                self._wake.clear()
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            with self._lock:
                self._link_error, mailbox = error, self._mailbox
            if mailbox is not None:
                mailbox.break_off(error)

    def _exchange(self, store: Store) -> StoreMailbox | None:
        with self._lock:
            mailbox = self._mailbox
        num_messages, num_chunks = mailbox.send(store) if mailbox is not None else (0, 0)
        with self._lock:
            is_open = mailbox is not None and mailbox.attempt == self._me.attempt
            message, num_chunks = (num_messages, num_chunks) if is_open else (0, 0)
            self._me = replace(self._me, beat=self._me.beat + 1, num_messages=message, num_chunks=num_chunks)
            mine, known = self._me, set(self._states)
        store.set(_key(mine.node_rank), mine.encode())
        missing = [node for node in range(mine.nnodes) if node not in known]
        came = {node for node in missing if store.check([_key(node)])}
        asked = sorted((known | came) - {mine.node_rank})
        asked_ns = time.monotonic_ns()
        found = [decode_state(text) for text in store.multi_get([_key(node) for node in asked])] if asked else []
        now = time.monotonic()
        with self._lock:
            self._answered_s, self._sent_beat = now, mine.beat
            self._states[mine.node_rank] = mine
            for state in found:
                if state.node_rank not in self._states or state.beat != self._states[state.node_rank].beat:
                    self._seen_s[state.node_rank] = now
                self._states[state.node_rank] = state
        if mailbox is not None:
            mailbox.fetch(store, found, asked_ns)
        return mailbox


def _key(node_rank: int) -> str:
    return f"node/{node_rank}"


SILENCE_S = 5.0
"""Seconds without a heartbeat after which a notice is shown."""


_TICK_S = 0.25
_STANDSTILL_S = 2.0
_CATCH_UP_S = 2.0
"""Seconds that this process needs, after it was suspended, to read what the other nodes wrote in the meantime."""


class Standstill:
    """Detects that this process was not running: stopped, on a suspended machine, or without CPU time."""

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
    """Checks for silent nodes. `limit_s`: seconds without a heartbeat after which to raise; `note` shows a notice.

    `standstill`: of this process. After one, nodes are not checked until their recent heartbeats have been read.
    """

    def __init__(self, limit_s: float, note: Callable[[str], None], standstill: Standstill) -> None:
        self._limit_s = limit_s
        self._note = note
        self._standstill = standstill
        self._noted_standstill_s = 0.0
        self._noted: dict[int, float] = {}

    def look(self, view: NodesView) -> None:
        """Show new notices. Raises RendezvousError if the store is lost or a node is silent for too long."""
        if view.link_error is not None:
            raise _link_lost(view)
        now = time.monotonic()
        self._standstill.tick(now)
        if self._standstill.length_s and now - self._standstill.ended_s < _CATCH_UP_S:
            self._note_standstill()
            return
        for node, silent_s in sorted(view.silent_s.items()):
            state = view.states[node]
            if state.phase != READY:
                continue
            if silent_s >= self._limit_s:
                raise RendezvousError(
                    f"watching {state.place}",
                    found=f"no heartbeat for {silent_s:.0f} s: the network between the nodes is down, or that "
                    "machine or its `ddpilot run` is suspended",
                    fix="Check that machine and the network; --node-timeout is the time allowed without a heartbeat",
                )
            if silent_s >= min(SILENCE_S, self._limit_s / 2):
                if node not in self._noted:
                    left_s = self._limit_s - silent_s
                    self._note(
                        f"no heartbeat from {state.place} for {silent_s:.0f} s: is the network or that machine down? "
                        f"Ranks here are terminated in {left_s:.0f} s (--node-timeout {self._limit_s:g})"
                    )
                self._noted[node] = silent_s
            elif node in self._noted:
                self._note(f"{state.place} is back after {self._noted.pop(node):.0f} s")

    def _note_standstill(self) -> None:
        if self._noted_standstill_s != self._standstill.ended_s:
            self._noted_standstill_s = self._standstill.ended_s
            self._note(
                f"`ddpilot run` on this node was not running for {self._standstill.length_s:.0f} s: "
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
        f"keeping the connection to {place}",
        found=f"its store is gone ({str(error).splitlines()[0]})",
        fix="Check the output of `ddpilot run` on that node: it was killed, or the machine failed",
    )
    lost.__cause__ = error
    return lost
