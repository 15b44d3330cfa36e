# SPDX-License-Identifier: Apache-2.0
"""Check a rendezvous address: the name resolves, the port is free on rank 0 and reachable from the other ranks."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

import psutil

from ddpilot.environments.variables import is_loopback
from ddpilot.errors import RendezvousError

_RESOLVE_LIMIT_S = 2.5
_FIRST_NOTICE_S = 5.0
_EVERY_S = 15.0
_log = logging.getLogger("ddpilot")
Result = TypeVar("Result")


def call_in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start `call` in a daemon thread `name`, for a call in C++ that blocks signals or may never return."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  (raised where the result is read)
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True, name=name).start()
    except RuntimeError:  # since Python 3.12, exit handlers cannot start threads
        run()
    return future


class WaitNotices:
    """Notices of one long wait, which starts now: shown by `note` after 5 s and then every 15 s."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._start_s = time.monotonic()
        self._due_s = _FIRST_NOTICE_S

    @property
    def waited_s(self) -> float:
        """Seconds since the wait started."""
        return time.monotonic() - self._start_s

    def show_if_due(self, text: str) -> None:
        """Show `text` if a notice is due."""
        if self.waited_s >= self._due_s:
            self._due_s = self.waited_s + _EVERY_S
            self._note(text)


def check_resolves(host: str, limit_s: float = _RESOLVE_LIMIT_S) -> None:
    """Raise RendezvousError within `limit_s` seconds if `host` is neither an address nor a name that resolves."""
    lookup = call_in_thread(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), "ddpilot-resolve")
    try:
        lookup.result(limit_s)
    except (OSError, UnicodeError, futures.TimeoutError) as error:
        why = getattr(error, "strerror", None) or str(error) or f"no answer from the resolver in {limit_s:g} s"
        raise RendezvousError(
            f"looking up MASTER_ADDR={host}",
            found=f"the name does not resolve ({why})",
            fix="Set MASTER_ADDR to the host name or address of the machine that runs rank 0.",
        ) from error


def wait_for_port(
    host: str, port: int, timeout_s: float, note: Callable[[str], None] = _log.warning, *, of: str = "rank 0"
) -> None:
    """Wait until `host`:`port`, the store of `of`, accepts connections. Raises RendezvousError after `timeout_s`.

    Polls often at first. `note` shows notices about a long wait.
    """
    notices, pause_s = WaitNotices(note), 0.02
    while True:
        try:
            limit_s = min(3.0, max(0.1, timeout_s - notices.waited_s))
            socket.create_connection((host, port), timeout=limit_s).close()
            return
        except OSError as error:
            last = error
        waited_s = notices.waited_s
        found = f"no answer from {host}:{port}"
        if waited_s >= timeout_s:
            raise RendezvousError(
                f"waiting for {of}",
                found=f"{found} for {waited_s:.0f} s ({last})",
                fix="Check that rank 0 runs on that machine, that every rank has the same MASTER_ADDR and MASTER_PORT, "
                "and that no firewall blocks the port.",
                missing=(0,),
            ) from last
        notices.show_if_due(f"waiting for {of}: {found} ({last}), for {waited_s:.0f} s of {timeout_s:g} s")
        time.sleep(min(pause_s, timeout_s - waited_s))
        pause_s = min(0.5, pause_s * 1.5)


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens on `port`: on loopback if `host` is loopback, else on all addresses.

    Returns None if this process itself listens there. Raises RendezvousError, naming the process that uses the port.
    """
    where = ("127.0.0.1" if host == "localhost" else host) if is_loopback(host) else "::" if _has_ipv6() else "0.0.0.0"
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    try:
        return socket.create_server((where, port), family=family, backlog=2048, dualstack_ipv6=where == "::")
    except OSError as error:
        holder = _holder(port) if error.errno == errno.EADDRINUSE else None
        if holder is not None and holder.pid == os.getpid():
            return None
        raise RendezvousError(
            f"opening rank 0's store on port {port}",
            found=_taken(error, holder),
            fix=f"Stop that process or choose a MASTER_PORT other than {port}.",
            rank=0,
        ) from error


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
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True).close()
    except (OSError, ValueError):
        return False
    return True
