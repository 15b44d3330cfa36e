# SPDX-License-Identifier: Apache-2.0
"""A proxy of `Loop` for callbacks on rank 0 that raises for collective calls, which would hang."""

from __future__ import annotations

from typing import Any

from ddpilot.errors import LoopError

_OF_LOOP = frozenset(
    {
        "prepare",
        "explain",
        "epochs",
        "batches",
        "save",
        "resume",
        "load",
        "backward",
        "step",
        "reduce",
        "gather",
        "gather_batch",
        "evaluate",
        "predict",
        "rank_zero_first",
    }
)
_OF_GROUP = frozenset({"barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object", "leave"})


class GuardedLoop:
    """Proxy of `loop` without its collectives, which raise a LoopError that names `callback`."""

    def __init__(self, loop: Any, callback: str) -> None:
        self.group = _Guard(loop.group, _OF_GROUP, "run.loop.group", callback)
        self._guard = _Guard(loop, _OF_LOOP, "run.loop", callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guard, name)


class _Guard:
    def __init__(self, inner: Any, refused: frozenset[str], path: str, callback: str) -> None:
        self._inner = inner
        self._refused = refused
        self._path = path
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        if name not in self._refused:
            return getattr(self._inner, name)
        raise LoopError(
            f"calling {self._path}.{name} in {self._callback}",
            found="`ranks` is 'zero': only rank 0 is there, and would wait for the others for ever",
            fix=f'Set `ranks = "all"` in {self._callback}, or do without the other ranks.',
            rank=0,
        )
