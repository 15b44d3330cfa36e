# SPDX-License-Identifier: Apache-2.0
"""Free a rank that is stuck in a collective, from another of its threads."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddpilot.errors import GroupError
from ddpilot.group.device import is_asynchronous
from ddpilot.group.sockets import can_find_sockets, find_gloo_sockets, find_store_sockets, shut

ABORT_LIMIT_S = 2.0
"""How long aborting communicators may take, all of them together."""

_ENDS_TOGETHER = "which ends only when every rank has come: end this rank"


@dataclass(frozen=True)
class Freed:
    """What `free_group` did in this rank."""

    group_sockets: int = 0
    """gloo connections shut."""
    store_sockets: int = 0
    """Connections to stores shut."""
    aborted: tuple[str, ...] = ()
    """Names of the groups whose communicators on a device (NCCL) were aborted. A collective that was in flight there
    ends with partial sums and without an error on the host, and the device goes on with what is queued behind it: the
    model and the optimizer may hold an unfinished update. Load a checkpoint on all ranks."""
    still_stuck: tuple[str, ...] = ()
    """Why this rank may stay stuck, one sentence each; empty where everything known was freed. Then end the rank."""


def free_group(endpoints: Iterable[tuple[str, int]] = ()) -> Freed:
    """Make every collective, store wait and `new_group` of this process return now, with an error.

    Not collective; to be called in *every* rank, from a thread that is not the stuck one (a stuck rank cannot see
    that its peers were freed unless they are its neighbours in the ring). Covers every process group, whoever made it,
    and the stores at `endpoints` (address, port) besides those that torch and the running functions hold. Sockets of
    the user stay as they are. The groups are unusable afterwards: `rebuild_group` or `Group.leave` comes next.

    Communicators of devices (NCCL) are aborted: what waits for one of their collectives, such as `.item()`, returns
    *without* an error, with partial sums. The next collective raises, and so does the next step of any optimizer.

    Cannot free a receive from any source, nor a rank that makes a communicator (both are reported in `still_stuck`),
    nor anything where sockets cannot be found (no Linux). Harmless without any group. Takes 2 s at most for aborting.
    """
    own = dict(_device_backends())
    if own:
        _steps.refuse()
    connecting = [name for name, backend in own.items() if not _has_communicator(backend)]
    if not can_find_sockets():
        why = f"sockets cannot be found on {sys.platform}: end this rank and start it again"
        aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
        return Freed(aborted=aborted, still_stuck=(why, *failures))
    # The groups first: a rank freed from a store wait may run on into a collective of a group that is still open.
    group_sockets = shut(find_gloo_sockets())
    store_sockets = shut(find_store_sockets({*endpoints, *_store_endpoints()}))
    aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
    return Freed(group_sockets, store_sockets, aborted, (*failures, *_unfreeable(connecting)))


def uses_device() -> bool:
    """True if this process has a group whose collectives return before the device has done them."""
    return next(_device_backends(), None) is not None


def abort_all(aborts: Mapping[str, Callable[[], None]], limit_s: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Call all `aborts`, by group name, at the same time; return the groups aborted, and a sentence for each other.

    At the same time, since aborting one communicator may wait for a kernel of another one that is aborted later
    (pytorch#119797). Waits `limit_s` seconds at most.
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
        except RuntimeError:  # from Python 3.12 on an exit handler can start none
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
    """Let optimizers step again: no freed group is left."""
    _steps.allow()


class _Steps:
    """Steps of optimizers, which raise after the group was freed under the gradients that they would take."""

    def __init__(self) -> None:
        self._freed: weakref.ref[dist.ProcessGroup] | None = None
        self._handle: Any = None

    def refuse(self) -> None:
        """From now on a step raises, until the default group that there is now is gone."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        world = dist.group.WORLD
        self._freed = None if world is None else weakref.ref(world)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._look)

    def allow(self) -> None:
        """Steps are as before."""
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
    """The backends of all groups, by the group's name, whose work is done on a device after the call has returned."""
    for group, name in list(c10d._world.pg_names.items()):
        backends = str(c10d._world.pg_backend_config.get(group, ""))
        for device in getattr(group, "_device_types", ()):
            if is_asynchronous(backends, device):
                yield str(name), group._get_backend(device)


def _has_communicator(backend: Any) -> bool:
    """False if the backend says that it has made none yet: a rank may be making one now, which nothing ends."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return not hasattr(backend, "_is_initialized") or bool(backend._is_initialized())


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


def _unfreeable(connecting: list[str]) -> Iterator[str]:
    for thread, frame in _running():
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
