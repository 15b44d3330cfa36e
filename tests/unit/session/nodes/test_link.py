# SPDX-License-Identifier: Apache-2.0
"""Messages between two ends, over pipes and over TLS, and the ends of connections."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing

import pytest

from ddpilot.session.nodes.link import Link, PipeStream
from ddpilot.session.nodes.tls import TlsListener, connect


def pipes() -> tuple[PipeStream, PipeStream]:
    """Both ends of a connection of two pipes."""
    (to_b, from_a), (to_a, from_b) = os.pipe(), os.pipe()
    return PipeStream(to_a, from_a), PipeStream(to_b, from_b)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Two connected links."""
    here, there = (Link(stream, silence_s=5.0) for stream in pipes())
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_in_order_whatever_their_size(ends: tuple[Link, Link]) -> None:
    """Neither end reads while both send more than the pipes hold."""
    here, there = ends
    for number in range(50):
        here.send((number, b"x" * (number << 14)))
        there.send((number, b"y" * (number << 14)))
    for link, letter in ((there, b"x"), (here, b"y")):
        for number in range(50):
            assert link.wait(10) == (number, letter * (number << 14))


def test_a_link_can_be_polled(ends: tuple[Link, Link]) -> None:
    """Its descriptor is readable while messages wait."""
    here, there = ends
    assert not select.select([there], [], [], 0)[0]
    here.send("news")
    assert select.select([there], [], [], 10)[0]
    assert list(there.take()) == ["news"]
    assert not select.select([there], [], [], 0)[0]


def test_a_closed_end_is_noticed(ends: tuple[Link, Link]) -> None:
    """After the messages that were sent before; sending does nothing then."""
    here, there = ends
    here.send("last words")
    here.close()
    assert there.wait(10) == "last words"
    assert there.wait(10) is None
    assert there.lost in ("closed its connection", "broke its connection ([Errno 32] Broken pipe)")
    there.send("too late")


def test_a_silent_end_is_noticed() -> None:
    """It has neither closed the connection nor sent a sign of life."""
    ours, theirs = pipes()
    link = Link(ours, silence_s=0.3)
    assert link.wait(10) is None
    assert link.lost == "has been silent for 0.3 s"
    link.close()
    theirs.close()


def test_a_node_with_the_key_connects_and_its_first_message_may_follow_at_once() -> None:
    """Over TLS 1.3, with the certificate of this session."""
    with closing(TlsListener(2)) as listener:
        stream = connect(["127.0.0.1"], listener.port, listener.certificate, listener.key(1), 1)
        there = Link(stream, silence_s=5.0)
        there.send("hello" * 1000)
        accepted = None
        while accepted is None:
            accepted = listener.take(1)
        here = Link(accepted, silence_s=5.0)
        assert here.wait(10) == "hello" * 1000
        here.send(b"x" * 3_000_000)
        assert there.wait(10) == b"x" * 3_000_000
        assert listener.take(0) is None
        there.close()
        assert here.wait(10) is None
        here.close()


def test_a_server_with_another_certificate_gets_no_key() -> None:
    """A node refuses it before it sends anything."""
    with closing(TlsListener(1)) as real, closing(TlsListener(1)) as fake, pytest.raises(OSError, match="CERTIFICATE"):
        connect(["127.0.0.1"], fake.port, real.certificate, real.key(0), 0)


@pytest.mark.parametrize("case", ["no key", "wrong key", "key of another node", "number out of range", "no TLS"])
def test_nothing_else_is_accepted(case: str) -> None:
    """The connection is closed, and none is kept."""
    with closing(TlsListener(2)) as listener, socket.create_connection(("127.0.0.1", listener.port), 10) as raw:
        if case == "no TLS":
            raw.sendall(b"x" * 36)
            assert raw.recv(100)[:1] in (b"", b"\x15")  # an alert
            assert raw.recv(100) == b""
        else:
            keys = {"no key": b"", "wrong key": bytes(32), "key of another node": bytes.fromhex(listener.key(1))}
            number = 7 if case == "number out of range" else 0
            context = ssl.create_default_context(cadata=listener.certificate)
            context.check_hostname = False
            with context.wrap_socket(raw) as secure:
                secure.sendall(number.to_bytes(4, "big") + keys.get(case, bytes.fromhex(listener.key(7))))
                if case != "no key":  # for which the listener waits 10 s
                    with contextlib.suppress(OSError):  # closed without a TLS message
                        assert secure.recv(100) == b""
        assert listener.take(0) is None
        assert listener.take(1) is None
