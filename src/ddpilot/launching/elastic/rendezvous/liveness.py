# SPDX-License-Identifier: Apache-2.0
"""Show a notice if a node stops sending heartbeats, and raise after `node_timeout_s`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddpilot.errors import DdpilotError, RendezvousError
from ddpilot.launching.elastic.rendezvous.node_state import READY, NodeState, View

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


class Vigil:
    """Checks successive views. `limit_s`: seconds without a heartbeat after which to raise; `say` shows a notice.

    `standstill`: of this process, which must catch up on what the other nodes have written before it judges them.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None], standstill: Standstill) -> None:
        self._limit_s = limit_s
        self._say = say
        self._standstill = standstill
        self._said_standstill_s = 0.0
        self._told: dict[int, float] = {}

    def look(self, view: View) -> None:
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


def silent_nodes(view: View, limit_s: float) -> list[NodeState]:
    """Nodes of `view` that have sent no heartbeat for `limit_s` seconds although their ranks run."""
    silent = [view.states[node] for node, silent_s in sorted(view.silent_s.items()) if silent_s >= limit_s]
    return [state for state in silent if state.phase == READY]


def _link_lost(view: View) -> DdpilotError:
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
