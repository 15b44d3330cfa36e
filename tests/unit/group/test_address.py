# SPDX-License-Identifier: Apache-2.0
"""Checks before the rendezvous, on this machine's own sockets."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from ddpilot.errors import RendezvousError
from ddpilot.group.address import check_resolves, listen, wait_for_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.1.2.3"])
def test_check_resolves_accepts_addresses_and_known_names(host: str) -> None:
    """An address needs no resolver."""
    check_resolves(host)


def test_check_resolves_gives_up_when_the_resolver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that hangs costs the limit, not its own timeout."""
    answered = threading.Event()

    def hang(*args: object, **kwargs: object) -> None:
        answered.wait(5)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR=slow: the name does not resolve \(no answer .* in 0.05 s"):
        check_resolves("slow", limit_s=0.05)
    answered.set()


def test_listen_stays_on_loopback_when_the_address_is_loopback() -> None:
    """A job on one machine opens nothing to the network."""
    with _listening("localhost") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_listen_takes_every_address_when_the_host_is_another() -> None:
    """Ranks of other machines have to reach the store."""
    with _listening("node1") as sock:
        assert sock.getsockname()[0] in {"::", "0.0.0.0"}


def test_listen_returns_nothing_when_this_process_listens_there_already() -> None:
    """A store of this process that is still there is used again instead of refused."""
    with _listening("127.0.0.1") as sock:
        assert listen("127.0.0.1", sock.getsockname()[1]) is None


def test_wait_for_port_returns_once_something_listens() -> None:
    """An open port is answered at once."""
    with _listening("127.0.0.1") as sock:
        wait_for_port("127.0.0.1", sock.getsockname()[1], timeout_s=1.0)


def test_wait_for_port_gives_up_when_nobody_listens() -> None:
    """The message has the address and the time, `missing` has rank 0."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(
            RendezvousError, match=f"waiting for rank 0: no answer from 127.0.0.1:{port} for 0 s"
        ) as caught:
            wait_for_port("127.0.0.1", port, timeout_s=0.1)
    assert caught.value.missing == (0,)
    assert time.monotonic() - start < 1.0


def _listening(host: str) -> socket.socket:
    sock = listen(host, 0)
    assert sock is not None
    return sock
