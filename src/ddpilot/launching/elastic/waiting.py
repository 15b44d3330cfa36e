# SPDX-License-Identifier: Apache-2.0
"""Wait in a thread for torch's rendezvous backends, whose C++ calls block signals and show no progress."""

from __future__ import annotations

import difflib
import importlib.metadata
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import psutil

from ddpilot.errors import LaunchError, RendezvousError
from ddpilot.group.address import is_loopback, listen

Result = TypeVar("Result")

FIRST_WORD_S = 5.0
"""Seconds of waiting after which a notice is shown."""

_WORD_EVERY_S = 15.0
_PAUSE_S = 0.1
_ANSWER_S = 0.5
_TORCHS_PORT = 29400
"""Default port of torch's c10d rendezvous."""

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # entry point group in which torch looks for other packages' backends

_MAGIC, _VALIDATE, _PING = 0x3C85F7CE, 0, 13
"""First request of a client of torch's TCPStore, and a request without side effects (TCPStoreBackend.hpp)."""


class Waiter(Generic[Result]):
    """Runs `call` in a thread, so that a signal interrupts the wait for it.

    `say` shows a notice after 5 s and then every 15 s; `describe` returns its text for the seconds waited.
    """

    def __init__(
        self, call: Callable[[], Result], say: Callable[[str], None], describe: Callable[[float], str]
    ) -> None:
        self._say = say
        self._describe = describe
        self._answer: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue()
        self._call = call

    def wait(self) -> Result:
        """Return or raise what `call` does. If a signal handler raises, the thread is abandoned."""
        threading.Thread(target=self._run, name="ddpilot-rendezvous", daemon=True).start()
        start, said_s = time.monotonic(), FIRST_WORD_S
        while True:
            try:
                result, error = self._answer.get(timeout=_PAUSE_S)
            except queue.Empty:
                waited_s = time.monotonic() - start
                if waited_s >= said_s:
                    said_s = waited_s + _WORD_EVERY_S
                    self._say(self._describe(waited_s))
                continue
            if error is not None:
                raise error
            return result  # type: ignore[return-value]  # None only where `call` returns it

    def _run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:  # raised by `wait`
            self._answer.put((None, error))
        else:
            self._answer.put((result, None))


def check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous backend of that name, including those of installed packages."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        guess = f"Did you mean {close[0]}? " if close else ""
        fix = f"{guess}Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's own"
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)


def check_endpoint(endpoint: str) -> None:
    """Raise RendezvousError if `endpoint` is a local port that is used by something other than a torch store.

    The error names the process. A store of another agent of the same job, or a tunnel to one, is accepted.
    """
    addr, port = _split(endpoint)
    if not _is_here(addr) or _ask(addr, port) != "something that is no torch store":
        return
    try:
        listener = listen(addr, port)
    except RendezvousError as error:
        raise RendezvousError(
            f"opening port {port} for the rendezvous",
            found=error.found,
            fix=f"Stop that process, or choose another port than {port} in --rdzv-endpoint, the same on every node",
        ) from error
    if listener is not None:  # the process has exited in the meantime
        listener.close()


def describe_endpoint(endpoint: str) -> str:
    """What answers at `endpoint`, as a clause for a notice. Takes at most half a second."""
    addr, port = _split(endpoint)
    return f"{_ask(addr, port)} answers at {addr}:{port}"


def _split(endpoint: str) -> tuple[str, int]:
    host, colon, text = endpoint.rpartition(":")
    if not colon or not text.isdigit():
        host, text = endpoint, str(_TORCHS_PORT)
    return host.strip("[]") or "localhost", int(text)


def _ask(addr: str, port: int) -> str:
    """What answers at the address: "nobody (why)", "torch's store" or "something that is no torch store"."""
    number = struct.pack("=I", 20113)
    try:
        with socket.create_connection((addr, port), timeout=_ANSWER_S) as connection:
            try:
                connection.sendall(struct.pack("=BIB", _VALIDATE, _MAGIC, _PING) + number)
                return "torch's store" if connection.recv(len(number)) == number else "something that is no torch store"
            except OSError:
                return "something that is no torch store"
    except OSError as error:
        return f"nobody ({error})"


def _is_here(addr: str) -> bool:
    if is_loopback(addr):
        return True
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    mine = {each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    return bool(found & mine)
