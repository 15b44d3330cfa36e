# SPDX-License-Identifier: Apache-2.0
"""Find and shut down the sockets of gloo and of torch's store in this process, and no others.

All connections of gloo are registered with the epoll instances of its own threads, so they are found through ``/proc``:
for every group, whichever code created it, also while it is being created, and never one of the user's sockets.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    loops = _epolls(_is_named_gloo) or _epolls(_is_like_gloo)
    watched = {fd for epoll in loops for fd in _watched_by(epoll)}
    return [found for fd in sorted(watched) if (found := _as_socket(fd)) is not None]


def find_store_sockets(endpoints: Iterable[tuple[str, int]]) -> list[OpenSocket]:
    """All client connections of this process to a store at one of `endpoints` (address, port) or hosted here."""
    wanted = {(ip, port) for host, port in endpoints for ip in _addresses(host)}
    hosted = _hosted_store_ports()
    found = []
    for connection in psutil.Process().net_connections(kind="tcp"):
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


def _hosted_store_ports() -> set[int]:
    """Ports on which stores hosted by this process listen."""
    watched = {fd for epoll in _epolls(_is_store) for fd in _watched_by(epoll)}
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.fd in watched and connection.status == psutil.CONN_LISTEN
    }


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


def _is_named_gloo(wait: _Wait) -> bool:
    return wait.thread == _GLOO_THREAD


def _is_like_gloo(wait: _Wait) -> bool:
    # Python's epoll objects register file descriptors as data, gloo registers addresses.
    return (wait.events, wait.timeout_ms) == _GLOO_WAIT and not _watches_by_number(wait.epoll)


def _is_store(wait: _Wait) -> bool:
    return wait.thread == _STORE_THREAD


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
