# SPDX-License-Identifier: Apache-2.0
"""Detect that the main thread is in init_process_group, with its rank and world size."""

from __future__ import annotations

import inspect
import os
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ddpilot.environments.running_frames import main_frame, reading_frames

_CHECK_NS = 1_000_000_000
_THIS_MACHINE = ("localhost", "127.", "::1")


class Entering(NamedTuple):
    """A call of init_process_group that has not returned."""

    since_ns: int
    """Time at which it was first seen, on CLOCK_MONOTONIC."""
    world_size: int
    rank: int
    is_closed: bool
    """True if only ranks of this job can join: they meet in their launcher's store, on this machine, and this process
    has no children that could be ranks too. False during the first second."""


class EntryFinder:
    """Finds a call of `init_process_group` on the main thread's stack; polled by one thread."""

    def __init__(self, init_process_group: Any) -> None:
        self._code: CodeType = inspect.unwrap(init_process_group).__code__
        self._since_ns = self._checked_ns = 0
        self._is_closed = False

    def find(self, now_ns: int) -> Entering | None:
        """Return the call that the main thread is in; None without one, or before its rank and size are resolved."""
        with reading_frames():
            frame = self._find_frame()
            said = None if frame is None else frame.f_locals
        if said is None:
            self._since_ns = 0
            return None
        self._since_ns = self._since_ns or now_ns
        world_size, rank = said.get("world_size"), said.get("rank")
        if not (isinstance(world_size, int) and isinstance(rank, int) and world_size > 0 and rank >= 0):
            return None
        if now_ns - max(self._since_ns, self._checked_ns) > _CHECK_NS:
            self._checked_ns = now_ns
            self._is_closed = _meets_in_own_store(said.get("init_method")) and not _has_children()
        return Entering(self._since_ns, world_size, rank, self._is_closed and self._checked_ns > self._since_ns)

    def _find_frame(self) -> FrameType | None:
        frame = main_frame()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame


def _has_children() -> bool:
    import psutil  # imported here, as few ranks wait this long

    return bool(psutil.Process().children())


def _meets_in_own_store(init_method: object) -> bool:
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_here = os.environ.get("MASTER_ADDR", "").startswith(_THIS_MACHINE)
    return isinstance(init_method, str) and init_method.startswith("env://") and is_agents and is_here
