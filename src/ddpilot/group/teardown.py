# SPDX-License-Identifier: Apache-2.0
"""Take down a process group without hanging, even if a rank is stuck in a collective or peers have exited.

`free_group` unblocks a stuck rank from a different thread. All connections of gloo are registered with the epoll
instances of its own threads, so they are found through ``/proc``: for every group, whichever code created it, also
while it is being created, and never one of the user's sockets.

`let_works_end` gives gloo's threads time before a process group or the process ends; it can otherwise hang or abort
(torch 2.13). The thread that completed a collective releases its tensors afterwards, and needs the GIL for tensors
that Python has seen.

- A group's destructor waits for those threads while it holds the GIL. This happens if a DDP model outlives its
  destroyed group, as at the end of a training function: 18 of 40 scripts on a busy machine.
- A process that exits with its group in use makes Python terminate such a thread, and C++ then aborts ("terminate
  called without an active exception", SIGABRT): 9 of 22 scripts of two ranks.
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddpilot.environments.interpreter import frames_of_threads, reading_frames
from ddpilot.errors import GroupError
from ddpilot.group.address import call_in_thread
from ddpilot.group.device import is_asynchronous
from ddpilot.group.members import read_member
from ddpilot.group.store import wait_for_keys

_SLICE_S = 0.1


def wait_for_peers(rank: int, world_size: int, limit_s: float) -> bool:
    """Announce to the peers that this rank leaves and wait until they leave too. Returns True if all of them have.

    All ranks should call it, but it never waits longer than `limit_s` seconds, nor for a peer whose process on this
    host is known to have exited, nor if the store is gone.
    """
    store = c10d._get_default_store()
    keys = [f"ddpilot/leaving/{peer}" for peer in range(world_size)]
    deadline = time.monotonic() + limit_s
    try:
        store.set(keys[rank], "")
        while True:
            if wait_for_keys(store, keys, _SLICE_S):
                return True
            awaited = [peer for peer, key in enumerate(keys) if not store.check([key])]
            if time.monotonic() > deadline or _any_gone(store, awaited):
                return False
    except RuntimeError:
        return False  # the store was freed or ended with the rank that hosted it: no peer can answer


def _any_gone(store: Store, ranks: list[int]) -> bool:
    members = (read_member(store, rank) for rank in ranks)
    return any(member is not None and member.is_gone() for member in members)


def take_down(healthy: bool) -> None:
    """Destroy all process groups of this process. `healthy`: True if every rank has reached this point.

    If not, the groups are freed first, because destroying them would wait for operations in progress.
    """
    if not healthy:
        free_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    allow_steps()
    # torch names a group's keys by this count; failed attempts count too, so ranks could otherwise disagree on it.
    c10d._world.group_count = 0
    # A DDP model keeps the old group alive and would silently continue to use it: make its next step fail instead.
    shut(find_gloo_sockets())


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


def free_group() -> Freed:
    """Make every collective, store wait and `new_group` of this process return now, with an error.

    Not collective, but must be called on *every* rank, from a thread other than the stuck one (a stuck rank notices
    that a peer was freed only if the peer is its neighbor in the ring). Frees every process group, whichever code
    created it, and the stores that torch and running functions hold. The user's own sockets are not touched.
    The groups are unusable afterwards: call `rebuild_group` or `Group.leave` next.

    Communicators of devices (NCCL) are aborted: a call that waits for one of their collectives, such as `.item()`,
    returns *without* an error, with partial sums. The next collective raises, and so does the next optimizer step.

    Cannot free a receive from any source or a rank that is creating a communicator (both are reported in
    `still_stuck`), and frees no sockets where they cannot be found (not Linux). Safe to call without any group.
    Aborting takes at most 2 s.
    """
    own = dict(_device_backends())
    if own:
        _refuse_steps()
    connecting = [name for name, backend in own.items() if not _has_communicator(backend)]
    if not can_find_sockets():
        why = f"sockets cannot be found on {sys.platform}: end this rank and start it again"
        aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
        return Freed(aborted, (why, *failures))
    # Groups first: a rank freed from a store wait could otherwise enter a collective of a group that is still open.
    shut(find_gloo_sockets())
    shut(find_store_sockets(_store_endpoints()))
    aborted, failures = abort_all({name: backend.abort for name, backend in own.items()}, ABORT_LIMIT_S)
    return Freed(aborted, (*failures, *_unfreeable(connecting)))


def uses_device() -> bool:
    """True if this process has a group whose collectives return before they complete on the device."""
    return next(_device_backends(), None) is not None


def abort_all(aborts: Mapping[str, Callable[[], None]], limit_s: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Call all `aborts`, given by group name, in parallel. Returns the aborted groups and one sentence per failure.

    In parallel, because aborting one communicator may wait for a kernel of one that must be aborted too
    (pytorch#119797). Waits at most `limit_s` seconds.
    """
    pending = {name: call_in_thread(abort, "ddpilot-abort") for name, abort in sorted(aborts.items())}
    deadline_s = time.monotonic() + limit_s
    aborted, failures = [], []
    for name, abort in pending.items():
        try:
            abort.result(max(0.0, deadline_s - time.monotonic()))
            aborted.append(name)
        except futures.TimeoutError:
            failures.append(f"aborting group {name!r} has not returned after {limit_s:g} s: end this rank")
        except RuntimeError as error:
            failures.append(f"aborting group {name!r} failed: {str(error).splitlines()[0]}")
    return tuple(aborted), tuple(failures)


_step_hooks: list[Any] = []
"""Handle of the hook that makes optimizer steps raise, if a freed group is left."""


def allow_steps() -> None:
    """Allow optimizer steps again: no freed group is left."""
    while _step_hooks:
        _step_hooks.pop().remove()


def _refuse_steps() -> None:
    """Make optimizer steps raise until the current default group is destroyed: gradients may be incomplete."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    world = dist.group.WORLD
    freed = (lambda: None) if world is None else weakref.ref(world)

    def look(*_: Any) -> None:
        if freed() is not None and freed() is dist.group.WORLD:
            raise GroupError(
                "taking a step of an optimizer",
                found="the process group was freed while this rank trained: its gradients may be partial sums",
                fix="Enter a new group and load a checkpoint on all ranks.",
                rank=dist.get_rank(),
            )

    allow_steps()
    _step_hooks.append(register_optimizer_step_pre_hook(look))


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


# Numbers of epoll_wait, epoll_pwait and epoll_pwait2 in /proc/self/task/*/syscall.
_EPOLL_CALLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_GLOO_THREAD = "gloo_tcp_loop"
_STORE_THREAD = "pt_tcpstore_uv"
_GLOO_WAIT = (64, 10)
"""Arguments of gloo's epoll_wait (maximum events, timeout in ms): identify its thread where it has no name (before
about torch 2.8)."""
_LOOKS = 8
_PAUSE_S = 0.002


@dataclass(frozen=True)
class OpenSocket:
    """A connected socket of this process; `inode` distinguishes it from a later one with the same descriptor."""

    fd: int
    inode: int


def can_find_sockets() -> bool:
    """True if sockets can be found on this platform (Linux with /proc). Elsewhere a stuck rank must be killed."""
    return Path("/proc/self/task").is_dir() and platform.machine() in _EPOLL_CALLS


def find_gloo_sockets() -> list[OpenSocket]:
    """All sockets registered with the event loop of a gloo device of this process; empty if gloo is not in use."""
    loops = _epolls(lambda wait: wait.thread == _GLOO_THREAD) or _epolls(_is_like_gloo)
    watched = {fd for epoll in loops for fd in _watched_by(epoll)}
    return [found for fd in sorted(watched) if (found := _as_socket(fd)) is not None]


def find_store_sockets(endpoints: Iterable[tuple[str, int]]) -> list[OpenSocket]:
    """All client connections of this process to a store at one of `endpoints` (address, port) or hosted here."""
    wanted = {(ip, port) for host, port in endpoints for ip in _addresses(host)}
    connections = psutil.Process().net_connections(kind="tcp")  # 8 ms: reads the table of the whole machine
    watched = {fd for epoll in _epolls(lambda wait: wait.thread == _STORE_THREAD) for fd in _watched_by(epoll)}
    hosted = {each.laddr.port for each in connections if each.fd in watched and each.status == psutil.CONN_LISTEN}
    found = []
    for connection in connections:
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        near, far = _plain(connection.laddr.ip), _plain(connection.raddr.ip)
        ours = (far, connection.raddr.port) in wanted or (near == far and connection.raddr.port in hosted)
        if ours and (sock := _as_socket(connection.fd)) is not None:
            found.append(sock)
    return found


def shut(sockets: Iterable[OpenSocket]) -> None:
    """Shut down the connected `sockets` in both directions, waking threads that wait on them."""
    for found in sockets:
        try:
            duplicate = os.dup(found.fd)
        except OSError:
            continue  # closed in the meantime
        with closing(socket.socket(fileno=duplicate)) as sock:
            if os.fstat(duplicate).st_ino == found.inode:
                try:
                    sock.getpeername()  # fails for a listening socket, which must keep listening
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected, or the peer has closed it


def _addresses(host: str) -> set[str]:
    try:
        return {_plain(str(entry[4][0])) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _plain(ip: str) -> str:
    return ip.removeprefix("::ffff:")


@dataclass(frozen=True)
class _Wait:
    """One thread's blocking call `epoll_wait(epoll, ..., events, timeout_ms)`."""

    thread: str
    epoll: int
    events: int
    timeout_ms: int


def _is_like_gloo(wait: _Wait) -> bool:
    # Python's epoll objects register file descriptors as data, gloo registers addresses.
    return (wait.events, wait.timeout_ms) == _GLOO_WAIT and not _watches_by_number(wait.epoll)


def _epolls(wanted: Callable[[_Wait], bool]) -> set[int]:
    """The epoll descriptors of all `wanted` waits. Samples several times, because a thread may be busy at times."""
    found: set[int] = set()
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        waits = [wait for task in Path("/proc/self/task").iterdir() if (wait := _wait_of(task)) is not None]
        found |= {wait.epoll for wait in waits if wanted(wait)}
    return found


def _wait_of(task: Path) -> _Wait | None:
    words = _read(task / "syscall").split()
    if len(words) < 5 or not words[0].isdigit() or int(words[0]) not in _EPOLL_CALLS[platform.machine()]:
        return None
    epoll, _, events, timeout = (int(word, 16) for word in words[1:5])
    return _Wait(_read(task / "comm").strip(), epoll, events, timeout)


def _watched_by(epoll: int) -> list[int]:
    return [int(words[1]) for words in _watches(epoll)]


def _watches_by_number(epoll: int) -> bool:
    # Python sets only the lower half of the 64 bits.
    return all(int(words[1]) == int(words[5], 16) & 0xFFFFFFFF for words in _watches(epoll))


def _watches(epoll: int) -> list[list[str]]:
    """The lines "tfd: 19 events: 19 data: 1c pos:..." of an epoll descriptor, split into words."""
    lines = _read(Path(f"/proc/self/fdinfo/{epoll}")).splitlines()
    return [line.split() for line in lines if line.startswith("tfd:")]


def _as_socket(fd: int) -> OpenSocket | None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
        return OpenSocket(fd, os.fstat(fd).st_ino) if target.startswith("socket:") else None
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the thread or descriptor is gone


_WORKER_THREAD = "pt_gloo_runloop"
_FUTEX_CALLS = {"x86_64": "202", "aarch64": "98"}
_THREAD_PAUSE_S = 0.001
"""Releases the GIL to waiting threads; a look at the workers follows."""
_NUM_LOOKS, _NUM_IDLE_LOOKS = 10, 2
"""Looks in a row that find no worker running (then none of them waits for the GIL), and that find all of them idle."""
_WORKS_LIMIT_S = 2.0

_MARK = "_ddpilot_lets_works_end"


def let_works_end() -> None:
    """Make `destroy_process_group` and this process's exit wait for gloo's threads. A second call does nothing."""
    destroy = c10d.destroy_process_group
    if hasattr(destroy, _MARK):
        return

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        kept = tuple(c10d._world.pg_map)  # otherwise the destructor may run in the next line
        destroy(group)
        _wait_for_workers()
        del kept

    def wait_at_exit() -> None:
        if dist.is_initialized():
            _wait_for_workers()

    setattr(destroy_process_group, _MARK, True)
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group
    atexit.register(wait_at_exit)


def _wait_for_workers() -> None:
    """Release the GIL until gloo's worker threads are idle or wait for a peer; at most 2 s.

    A worker that needs the GIL gets it during a pause, but a busy machine may run the worker much later. Where no
    worker can be seen, pauses for 10 ms.
    """
    deadline_s = time.monotonic() + _WORKS_LIMIT_S
    num_still = num_idle = 0
    while num_still < _NUM_LOOKS and num_idle < _NUM_IDLE_LOOKS and time.monotonic() < deadline_s:
        time.sleep(_THREAD_PAUSE_S)
        calls = _calls_of_workers()
        num_still = 0 if ["running"] in calls else num_still + 1
        num_idle = num_idle + 1 if calls and all(map(_is_idle, calls)) else 0


def _calls_of_workers() -> list[list[str]]:
    """Number and arguments of the system call of every worker thread, or ["running"] if it is in none."""
    if not can_find_sockets():
        return []
    workers = (task for task in Path("/proc/self/task").iterdir() if _read(task / "comm").strip() == _WORKER_THREAD)
    return [call for worker in workers if (call := _read(worker / "syscall").split())]


def _is_idle(call: list[str]) -> bool:
    """True if the worker waits for its next collective: a futex without a timeout. Waits for the GIL have one."""
    return call[0] == _FUTEX_CALLS[platform.machine()] and int(call[4], 16) == 0
