# SPDX-License-Identifier: Apache-2.0
"""When silence of another node is worth a word, and when it is the end."""

from __future__ import annotations

from collections.abc import Callable

from ddpilot.errors import DdpilotError, RendezvousError
from ddpilot.launching.elastic.nodes import READY, NodeState, View

SILENCE_S = 5.0
"""Silence of a node that is worth a line, seconds."""


class Vigil:
    """Looks at one view after another. `limit_s`: the silence that ends this node; `say` shows a line."""

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._say = say
        self._told: dict[int, float] = {}

    def look(self, view: View) -> None:
        """Say what is new. Raises RendezvousError for a node that is gone, or has been silent for too long."""
        if view.link_error is not None:
            raise _link_lost(view)
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


def silent_nodes(view: View, limit_s: float) -> list[NodeState]:
    """The nodes of `view` that have given no sign for `limit_s` seconds, though their ranks run."""
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
