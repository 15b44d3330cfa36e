# SPDX-License-Identifier: Apache-2.0
"""Which backward passes of a DDP model are reduced, worked out from the order of its forwards and backwards."""

from __future__ import annotations

_MAX_EVENTS = 32
RETAINED = "R"


class Reductions:
    """Follows one model. DDP arms itself in a forward outside `no_sync`, and reduces the next backward, only that one.

    `events` since `mark`: ``F`` forward, ``f`` forward in `no_sync`, ``B`` backward, ``b`` in `no_sync`, ``R`` backward
    that retained its graph.
    """

    def __init__(self) -> None:
        self.num_forwards = 0
        """Those outside `no_sync`: as many on all ranks, since DDP's collectives belong to them."""
        self.position = 0
        """How many events there were."""
        self._events = ""  # the newest of them
        self._is_armed = False
        self._num_spare = 0  # forwards whose backward is still to come, besides the one that is reduced
        self._num_local = 0
        self._last_was_retained = False

    def forward(self, *, syncs: bool) -> None:
        """A forward began, with gradients on."""
        self._events = (self._events + ("F" if syncs else "f"))[-_MAX_EVENTS:]
        self.position += 1
        if syncs:
            self.num_forwards += 1
            self._num_spare += self._is_armed
            self._is_armed = True
        else:
            self._num_local += 1

    def backward(self, *, syncs: bool, retains: bool) -> str:
        """A backward ended that changed the model's gradients; why they were not reduced, empty where they were."""
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
        """An optimizer took what there was: forwards before that got no backward are not waited for."""
        self._num_spare = self._num_local = 0
        self._last_was_retained = False

    def since(self, position: int) -> str:
        """The events from `position` on; the newest 32 where there were more."""
        return self._events[position - self.position :] if position < self.position else ""
