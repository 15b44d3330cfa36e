# SPDX-License-Identifier: Apache-2.0
"""Waiting for a rendezvous of torch's: in C++, which holds back every signal and says nothing, so in a thread."""

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
"""Seconds of waiting that are worth a line."""

_WORD_EVERY_S = 15.0
_PAUSE_S = 0.1
_ANSWER_S = 0.5
_TORCHS_PORT = 29400
"""Where torch's c10d rendezvous is if no port is given."""

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # where torch looks for those of other packages

_MAGIC, _VALIDATE, _PING = 0x3C85F7CE, 0, 13
"""How a client of torch's TCPStore begins, and a question that changes nothing (TCPStoreBackend.hpp)."""


class Waiter(Generic[Result]):
    """`call` in a thread of its own, so that a signal ends the wait for it.

    `say` shows a line after 5 s, and every 15 s then; `describe` gives its text for the seconds waited.
    """

    def __init__(
        self, call: Callable[[], Result], say: Callable[[str], None], describe: Callable[[float], str]
    ) -> None:
        self._say = say
        self._describe = describe
        self._answer: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue()
        self._call = call

    def wait(self) -> Result:
        """What `call` returns or raises. Where a signal's handler raises instead, the thread is left to itself."""
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
        except BaseException as error:  # to be raised by `wait`
            self._answer.put((None, error))
        else:
            self._answer.put((result, None))


def check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous of that name; those of installed packages count."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        guess = f"Did you mean {close[0]}? " if close else ""
        fix = f"{guess}Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's own"
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)


def check_endpoint(endpoint: str) -> None:
    """Raise RendezvousError where `endpoint` is a port of this machine that another than torch's store holds.

    The holder is named. A store of another agent of the same job is fine, and so is a tunnel to one.
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
    if listener is not None:  # it went away meanwhile
        listener.close()


def describe_endpoint(endpoint: str) -> str:
    """Who answers at `endpoint`, as the rest of a sentence. Takes half a second at most."""
    addr, port = _split(endpoint)
    return f"{_ask(addr, port)} answers at {addr}:{port}"


def _split(endpoint: str) -> tuple[str, int]:
    host, colon, text = endpoint.rpartition(":")
    if not colon or not text.isdigit():
        host, text = endpoint, str(_TORCHS_PORT)
    return host.strip("[]") or "localhost", int(text)


def _ask(addr: str, port: int) -> str:
    """Who answers there: "nobody (why)", "torch's store" or "something that is no torch store"."""
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
