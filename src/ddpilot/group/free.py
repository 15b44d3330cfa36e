# SPDX-License-Identifier: Apache-2.0
"""Unblock a rank that is stuck in a collective, by freeing its process groups from a different thread."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddpilot.environments.running_frames import frames_of_threads, reading_frames
from ddpilot.errors import GroupError
from ddpilot.group.device import is_asynchronous
from ddpilot.group.sockets import can_find_sockets, find_gloo_sockets, find_store_sockets, shut

ABORT_LIMIT_S = 2.0
"""Maximum time in seconds for aborting all communicators."""

_ENDS_TOGETHER = "which ends only when every rank has come: end this rank"


@dataclass(frozen=True)
class Freed:
    """Result of `free_group` on this rank."""

    aborted: tuple[str, ...] = ()
    """Names of the groups whose device communicators (NCCL) were aborted. A collective that was in progress there ends
    with partial sums and without an error on the host, and the device continues with the kernels queued after it: the
    model and the optimizer may hold an unfinished update. Load a checkpoint on all ranks."""
    still_stuck: tuple[str, ...] = ()
    """Why this rank may remain stuck, one sentence each; then terminate the rank. Empty if everything was freed."""


def free_group(endpoints: Iterable[tuple[str, int]] = ()) -> Freed:
    """Make every collective, store wait and `new_group` of this process return now, with an error.

    Not collective, but must be called on *every* rank, from a thread other than the stuck one (a stuck rank notices
    that a peer was freed only if the peer is its neighbor in the ring). Frees every process group, whichever code
    created it, and the stores at `endpoints` (address, port) besides those that torch and running functions hold. The
    user's own sockets are not touched. The groups are unusable afterwards: call `rebuild_group` or `Group.leave` next.

    Communicators of devices (NCCL) are aborted: a call that waits for one of their collectives, such as `.item()`,
    returns *without* an error, with partial sums. The next collective raises, and so does the next optimizer step.

    Cannot free a receive from any source or a rank that is creating a communicator (both are reported in
    `still_stuck`), and frees no sockets where they cannot be found (not Linux). Safe to call without any group.
    Aborting takes at most 2 s.
    """
    own = dict(_device_backends())
    if own:
        _steps.refuse()
    connecting = [name for name, backend in own.items() if not _has_communicator(backend)]
    if not can_find_sockets():
        why = f"sockets cannot be found on {sys.platform}: end this rank and start it again"
        aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
        return Freed(aborted, (why, *failures))
    # Groups first: a rank freed from a store wait could otherwise enter a collective of a group that is still open.
    shut(find_gloo_sockets())
    shut(find_store_sockets({*endpoints, *_store_endpoints()}))
    aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
    return Freed(aborted, (*failures, *_unfreeable(connecting)))


def uses_device() -> bool:
    """True if this process has a group whose collectives return before they complete on the device."""
    return next(_device_backends(), None) is not None


def abort_all(aborts: Mapping[str, Callable[[], None]], limit_s: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Call all `aborts`, given by group name, in parallel. Returns the aborted groups and one sentence per failure.

    In parallel, because aborting one communicator may wait for a kernel of another one that must be aborted too
    (pytorch#119797). Waits at most `limit_s` seconds.
    """
    failures: dict[str, str] = {}

    def run(name: str, abort: Callable[[], None]) -> None:
        try:
            abort()
        except RuntimeError as error:
            failures[name] = f"aborting group {name!r} failed: {str(error).splitlines()[0]}"

    threads: dict[str, threading.Thread] = {}
    for name in sorted(aborts):
        threads[name] = threading.Thread(target=run, args=(name, aborts[name]), daemon=True, name="ddpilot-abort")
        try:
            threads[name].start()
        except RuntimeError:  # since Python 3.12, exit handlers cannot start threads
            run(name, aborts[name])
    deadline_s = time.monotonic() + limit_s
    for name, thread in threads.items():
        if thread.ident is not None:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            failures[name] = f"aborting group {name!r} has not returned after {limit_s:g} s: end this rank"
    aborted = tuple(name for name in threads if name not in failures)
    return aborted, tuple(failures[name] for name in threads if name in failures)


def allow_steps() -> None:
    """Allow optimizer steps again: no freed group is left."""
    _steps.allow()


class _Steps:
    """Makes optimizer steps raise after their group was freed, since the gradients may be incomplete."""

    def __init__(self) -> None:
        self._freed: weakref.ref[dist.ProcessGroup] | None = None
        self._handle: Any = None

    def refuse(self) -> None:
        """Make optimizer steps raise until the current default group has been destroyed."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        world = dist.group.WORLD
        self._freed = None if world is None else weakref.ref(world)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._look)

    def allow(self) -> None:
        """Allow optimizer steps again."""
        self._freed = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, *_: Any) -> None:
        freed = None if self._freed is None else self._freed()
        if freed is not None and freed is dist.group.WORLD:
            raise GroupError(
                "taking a step of an optimizer",
                found="the process group was freed while this rank trained: its gradients may be partial sums",
                fix="Enter a new group and load a checkpoint on all ranks.",
                rank=dist.get_rank(),
            )


_steps = _Steps()


def _device_backends() -> Iterator[tuple[str, Any]]:
    """Names and backends of all groups whose work completes on a device after the call has returned."""
    for group, name in list(c10d._world.pg_names.items()):
        backends = str(c10d._world.pg_backend_config.get(group, ""))
        for device in getattr(group, "_device_types", ()):
            if is_asynchronous(backends, device):
                yield str(name), group._get_backend(device)


def _has_communicator(backend: Any) -> bool:
    """False if the backend reports no communicator: a rank may be creating one, which cannot be interrupted."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return not hasattr(backend, "_is_initialized") or bool(backend._is_initialized())


def _store_endpoints() -> set[tuple[str, int]]:
    """Addresses of the stores that torch's groups use or that a running function holds in a local variable."""
    stores = [store for _, store in list(c10d._world.pg_map.values())]
    with reading_frames():
        held = [value for _, frame in frames_of_threads() for value in list(frame.f_locals.values())]
    found = set()
    for store in [*stores, *filter(_is_store, held)]:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            found.add((store.host, store.port))
    return found


def _is_store(value: Any) -> bool:
    # By type and not by isinstance, which would evaluate `__class__` of arbitrary user objects.
    return issubclass(type(value), Store)


def _unfreeable(connecting: list[str]) -> Iterator[str]:
    for thread, frame in frames_of_threads():
        is_making = frame.f_code is _code_of(c10d._new_process_group_helper)
        if is_making and frame.f_locals.get("device_id") is not None:
            yield f"thread {thread!r} may be connecting a new group, {_ENDS_TOGETHER}"
        if connecting and frame.f_code.co_filename == c10d.__file__:
            names = ", ".join(connecting)
            connecting = []
            yield f"thread {thread!r} may be in the first collective of group {names} on its device, {_ENDS_TOGETHER}"
        if frame.f_code is _code_of(c10d.recv):
            asked = frame.f_locals
            if asked.get("src") is None and asked.get("group_src") is None:
                yield f"thread {thread!r} waits in recv() from any source, which nothing can free: end this rank"


def _code_of(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__
