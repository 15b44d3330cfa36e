# SPDX-License-Identifier: Apache-2.0
"""Check a rendezvous address: the name resolves, the port is free on rank 0 and reachable from the other ranks."""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import threading
import time

import psutil

from ddpilot.environments.variables import is_loopback
from ddpilot.errors import RendezvousError

_RESOLVE_LIMIT_S = 2.5
_PATIENCE_S = 5.0
_log = logging.getLogger("ddpilot")


def check_resolves(host: str, limit_s: float = _RESOLVE_LIMIT_S) -> None:
    """Raise RendezvousError within `limit_s` seconds if `host` is neither an address nor a name that resolves."""
    answer: queue.Queue[OSError | None] = queue.Queue()

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            answer.put(error)
        else:
            answer.put(None)

    # A resolver call cannot be interrupted; in a daemon thread it may finish late without blocking this rank.
    threading.Thread(target=ask, daemon=True, name="ddpilot-resolve").start()
    try:
        error = answer.get(timeout=limit_s)
    except queue.Empty:
        error = TimeoutError(f"no answer from the resolver in {limit_s:g} s")
    if error is not None:
        raise RendezvousError(
            f"looking up MASTER_ADDR={host}",
            found=f"the name does not resolve ({error.strerror or error})",
            fix="Set MASTER_ADDR to the host name or address of the machine that runs rank 0.",
        ) from error


def wait_for_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until `host`:`port` accepts connections. Raises RendezvousError after `timeout_s` seconds.

    Polls often at first. Logs one warning after 5 s.
    """
    start, pause_s, has_warned = time.monotonic(), 0.02, False
    while True:
        waited = time.monotonic() - start
        try:
            socket.create_connection((host, port), timeout=min(3.0, max(0.1, timeout_s - waited))).close()
            return
        except OSError as error:
            last = error
        waited = time.monotonic() - start
        if waited >= timeout_s:
            raise RendezvousError(
                f"connecting to rank 0's store at {host}:{port}",
                found=f"no answer for {waited:.1f} s ({last})",
                fix="Check that rank 0 runs on that machine, that every rank has the same MASTER_ADDR and MASTER_PORT, "
                "and that no firewall blocks the port.",
                missing=(0,),
            ) from last
        if waited > _PATIENCE_S and not has_warned:
            has_warned = True
            _log.warning("still waiting for rank 0: no answer from %s:%d (%s)", host, port, last)
        time.sleep(min(pause_s, timeout_s - waited))
        pause_s = min(0.5, pause_s * 1.5)


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens on `port`: on loopback if `host` is loopback, else on all addresses.

    Returns None if this process itself listens there. Raises RendezvousError, naming the process that uses the port.
    """
    where = ("127.0.0.1" if host == "localhost" else host) if is_loopback(host) else "::" if _has_ipv6() else "0.0.0.0"
    sock = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if where == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((where, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        holder = _holder(port) if error.errno == errno.EADDRINUSE else None
        if holder is not None and holder.pid == os.getpid():
            return None
        raise RendezvousError(
            f"opening rank 0's store on port {port}",
            found=_taken(error, holder),
            fix=f"Stop that process or choose a MASTER_PORT other than {port}.",
            rank=0,
        ) from error
    return sock


def _taken(error: OSError, holder: psutil.Process | None) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"the port cannot be opened ({error.strerror or error})"
    if holder is None:
        return "the port is taken by a process that this user cannot see"
    try:
        command = " ".join(" ".join(holder.cmdline()).split())[:200]  # `python -c` has lines in its arguments
        return f"the port is taken by pid {holder.pid}: {command or holder.name()}"
    except psutil.Error:
        return f"the port is taken by pid {holder.pid}"


def _holder(port: int) -> psutil.Process | None:
    # Process by process, because the system-wide table requires privileges on some platforms.
    for process in psutil.process_iter():
        try:
            for found in process.net_connections(kind="tcp"):
                if found.status == psutil.CONN_LISTEN and found.laddr.port == port:
                    return process
        except psutil.Error:
            continue
    return None


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::", 0))
    except OSError:
        return False
    return True
