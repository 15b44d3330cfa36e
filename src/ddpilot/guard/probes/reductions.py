# SPDX-License-Identifier: Apache-2.0
"""Determine from the order of forwards and backwards which backward passes of a DDP model are reduced."""

from __future__ import annotations

_MAX_EVENTS = 32
RETAINED = "R"


class Reductions:
    """Follows one model. A forward outside `no_sync` prepares DDP to reduce the next backward, and only that one.

    Events: ``F`` forward, ``f`` forward in `no_sync`, ``B`` backward, ``b`` backward in `no_sync`, ``R`` backward that
    retained its graph.
    """

    def __init__(self) -> None:
        self.num_forwards = 0
        """Forwards outside `no_sync`: equal on all ranks, since DDP's collectives belong to them."""
        self.position = 0
        """Number of events so far."""
        self._events = ""  # the newest events
        self._is_armed = False
        self._num_spare = 0  # forwards whose backward is still to come, besides the one that is reduced
        self._num_local = 0
        self._last_was_retained = False

    def forward(self, *, syncs: bool) -> None:
        """Count a forward that starts with gradients enabled."""
        self._events = (self._events + ("F" if syncs else "f"))[-_MAX_EVENTS:]
        self.position += 1
        if syncs:
            self.num_forwards += 1
            self._num_spare += self._is_armed
            self._is_armed = True
        else:
            self._num_local += 1

    def backward(self, *, syncs: bool, retains: bool) -> str:
        """Count a backward that changed the model's gradients. Returns why they were not reduced, or ""."""
        self._events = (self._events + (RETAINED if retains else "B" if syncs else "b"))[-_MAX_EVENTS:]
        self.position += 1
        was_retained, self._last_was_retained = self._last_was_retained, retains
        if self._is_armed:
            self._is_armed = False
            self._num_local = 0
            return ""
        if self._num_local:
            self._num_local -= 1
            return "no_sync" if not syncs else "forward in no_sync"
        if self._num_spare:
            self._num_spare -= 1
            return "two forwards"
        return "twice" if was_retained else "bypass"

    def step(self) -> None:
        """Count an optimizer step: earlier forwards without a backward are no longer expected to have one."""
        self._num_spare = self._num_local = 0
        self._last_was_retained = False

    def since(self, position: int) -> str:
        """Return the events from `position` on, at most the newest 32."""
        return self._events[position - self.position :] if position < self.position else ""
