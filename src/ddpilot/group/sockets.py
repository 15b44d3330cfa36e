# SPDX-License-Identifier: Apache-2.0
"""Find the sockets that belong to gloo and to torch's store in this process, and nothing else, and shut them.

gloo's connections all hang on the event loop of a thread that gloo names, so they are found from the kernel's side:
whoever made the group, also while it is being made, and never a socket of the user's.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

_EPOLL_CALLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_LOOP_THREADS = ("gloo_tcp_loop",)
_SERVER_THREADS = ("pt_tcpstore_uv",)
_LOOK_S = 0.2


@dataclass(frozen=True)
class OpenSocket:
    """A connected socket of this process; `inode` tells it from a later one with the same number."""

    fd: int
    inode: int


def can_find_sockets() -> bool:
    """Can sockets be found on this platform (Linux with /proc)? Elsewhere a stuck rank has to be killed."""
    return Path("/proc/self/task").is_dir() and platform.machine() in _EPOLL_CALLS


def find_gloo_sockets() -> list[OpenSocket]:
    """Every socket on the event loop of a gloo device of this process; none where gloo is not in use."""
    loops = {epoll for thread in _threads(_LOOP_THREADS) if (epoll := _epoll_of(thread)) is not None}
    watched = (fd for epoll in loops for fd in _watched_by(epoll))
    return [found for fd in sorted(watched) if (found := _as_socket(fd)) is not None]


def find_store_sockets(endpoints: Iterable[tuple[str, int]]) -> list[OpenSocket]:
    """Every client connection of this process to a store at one of `endpoints` (address, port) or hosted here."""
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


def shut(sockets: Iterable[OpenSocket]) -> int:
    """Shut every connected one of `sockets` in both directions; returns how many. Whoever waits on one is woken."""
    count = 0
    for found in sockets:
        try:
            duplicate = os.dup(found.fd)
        except OSError:
            continue  # closed since it was found
        with closing(socket.socket(fileno=duplicate)) as sock:
            if os.fstat(duplicate).st_ino == found.inode:
                try:
                    sock.getpeername()  # a socket that only listens has none, and must go on listening
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
                except OSError:
                    continue  # not connected, or the other side was faster
    return count


def _hosted_store_ports() -> set[int]:
    """The ports on which a store hosted by this process listens."""
    loops = {epoll for thread in _threads(_SERVER_THREADS) if (epoll := _epoll_of(thread)) is not None}
    watched = {fd for epoll in loops for fd in _watched_by(epoll)}
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


def _threads(names: tuple[str, ...]) -> list[Path]:
    return [task for task in Path("/proc/self/task").iterdir() if _read(task / "comm").strip() in names]


def _epoll_of(thread: Path) -> int | None:
    """The epoll descriptor that `thread` sleeps on; a busy thread is looked at again for a moment."""
    calls = _EPOLL_CALLS[platform.machine()]
    deadline = time.monotonic() + _LOOK_S
    while True:
        words = _read(thread / "syscall").split()
        if len(words) > 1 and words[0].isdigit() and int(words[0]) in calls:
            return int(words[1], 16)
        if not words or time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def _watched_by(epoll: int) -> list[int]:
    lines = _read(Path(f"/proc/self/fdinfo/{epoll}")).splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


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
        return ""  # the thread or descriptor ended since it was listed
