# SPDX-License-Identifier: Apache-2.0
"""Waiting in a thread, and who holds the port of a rendezvous."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddpilot.errors import RendezvousError
from ddpilot.launching.elastic.waiting import Waiter, check_endpoint, describe_endpoint


@pytest.fixture(autouse=True)
def short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers here: no need to wait for it."""
    monkeypatch.setattr("ddpilot.launching.elastic.waiting._ANSWER_S", 0.05)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Something that listens and answers nothing, as a web server does that waits for a whole line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_waiter_returns_and_raises_what_the_call_does() -> None:
    """As if it had been called here; nothing is said of a short wait."""
    said: list[str] = []
    assert Waiter(lambda: 7, said.append, str).wait() == 7
    with pytest.raises(ValueError, match="bad"):
        Waiter(lambda: int("bad"), said.append, str).wait()
    assert said == []


def test_describe_endpoint_tells_nobody_from_somebody_else(server: socket.socket) -> None:
    """A closed port has the system's reason."""
    port = server.getsockname()[1]
    assert describe_endpoint(f"127.0.0.1:{port}") == f"something that is no torch store answers at 127.0.0.1:{port}"
    server.close()
    assert describe_endpoint(f"127.0.0.1:{port}").startswith("nobody ([Errno ")
    assert describe_endpoint("127.0.0.1").endswith(" answers at 127.0.0.1:29400")


def test_check_endpoint_lets_a_free_port_and_another_machine_through() -> None:
    """What is elsewhere is for the wait to find out."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    check_endpoint(f"127.0.0.1:{port}")
    check_endpoint("name.invalid:1")


HOLDER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        listener.accept()[0].close()
"""


def test_check_endpoint_names_who_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process does: a port of this very one may be its caller's own store."""
    monkeypatch.setattr("ddpilot.launching.elastic.waiting._ANSWER_S", 20.0)  # it answers at once, by hanging up
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(RendezvousError, match=f"the port is taken by pid {holder.pid}: "):
            check_endpoint(f"localhost:{port}")
        holder.kill()
