# SPDX-License-Identifier: Apache-2.0
"""Free a rank that is stuck in a collective, from another of its threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddpilot.group.sockets import can_find_sockets, find_gloo_sockets, find_store_sockets, shut


@dataclass(frozen=True)
class Freed:
    """What `free_group` did in this rank."""

    group_sockets: int = 0
    """gloo connections shut."""
    store_sockets: int = 0
    """Connections to stores shut."""
    aborted: tuple[str, ...] = ()
    """Names of the groups whose NCCL communicators were aborted."""
    still_stuck: tuple[str, ...] = ()
    """Why this rank may stay stuck, one sentence each; empty where everything known was freed. Then end the rank."""


def free_group(endpoints: Iterable[tuple[str, int]] = ()) -> Freed:
    """Make every collective, store wait and `new_group` of this process return now, with an error.

    Not collective; to be called in *every* rank, from a thread that is not the stuck one (a stuck rank cannot see
    that its peers were freed unless they are its neighbours in the ring). Covers every process group, whoever made it,
    and the stores at `endpoints` (address, port) besides those that torch and the running functions hold. Sockets of
    the user stay as they are. The groups are unusable afterwards: `rebuild_group` or `Group.leave` comes next.

    Cannot free a receive from any source (reported in `still_stuck` where it is a running `recv`), nor anything where
    sockets cannot be found (no Linux). With NCCL the communicators are aborted. Harmless without any group.
    """
    if not can_find_sockets():
        why = f"sockets cannot be found on {sys.platform}: end this rank and start it again"
        return Freed(aborted=_abort_nccl(), still_stuck=(why,))
    # The groups first: a rank freed from a store wait may run on into a collective of a group that is still open.
    group_sockets = shut(find_gloo_sockets())
    store_sockets = shut(find_store_sockets({*endpoints, *_store_endpoints()}))
    return Freed(group_sockets, store_sockets, _abort_nccl(), tuple(_unfreeable()))


def _store_endpoints() -> set[tuple[str, int]]:
    """Where the stores are that torch's groups use or that a function which is running now holds in a variable."""
    stores = [store for _, store in list(c10d._world.pg_map.values())]
    stores += [value for _, frame in _running() for value in list(frame.f_locals.values()) if _is_store(value)]
    found = set()
    for store in stores:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            found.add((store.host, store.port))
    return found


def _is_store(value: Any) -> bool:
    # By type and not isinstance, which would run __class__ of whatever objects the user has.
    return issubclass(type(value), Store)


def _running() -> Iterator[tuple[str, FrameType]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            yield names.get(ident, str(ident)), frame
            frame = frame.f_back


def _unfreeable() -> Iterator[str]:
    for thread, frame in _running():
        if frame.f_code is _code_of(c10d.recv):
            asked = frame.f_locals
            if asked.get("src") is None and asked.get("group_src") is None:
                yield f"thread {thread!r} waits in recv() from any source, which nothing can free: end this rank"


def _code_of(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def _abort_nccl() -> tuple[str, ...]:
    """Abort the communicators of every NCCL group, inside one NCCL group call so that they cannot wait for another."""
    backends: dict[str, dist.ProcessGroupNCCL] = {}
    for group, group_name in list(c10d._world.pg_names.items()):
        if dist.is_nccl_available() and "cuda" in str(group._device_types):
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backends[str(group_name)] = backend
    if not backends:
        return ()
    first = next(iter(backends.values()))
    first._group_start()
    try:
        for _, backend in sorted(backends.items(), reverse=True):
            backend.abort()
    finally:
        first._group_end()
    return tuple(sorted(backends))
