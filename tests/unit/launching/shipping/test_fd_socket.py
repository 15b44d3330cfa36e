# SPDX-License-Identifier: Apache-2.0
"""Frames with descriptors."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ddpilot.launching.shipping import fd_socket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def num_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_wire_carries_bodies_and_descriptors_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """Two frames come out as two, each with its own descriptors, which are not inherited by programs."""
    reader, writer = os.pipe()
    fd_socket.send(pair[0], {"a": 1}, [writer])
    fd_socket.send(pair[0], "second")
    os.close(writer)
    body, (received,) = fd_socket.receive(pair[1])
    assert body == {"a": 1}
    assert not os.get_inheritable(received)
    os.write(received, b"hello")
    assert os.read(reader, 5) == b"hello"
    os.close(received)
    os.close(reader)
    assert fd_socket.receive(pair[1]) == ("second", [])


def test_wire_carries_a_body_larger_than_the_socket_s_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    """5 MB go through in pieces."""
    body = os.urandom(5_000_000)
    sender = threading.Thread(target=fd_socket.send, args=(pair[0], body))
    sender.start()
    assert fd_socket.receive(pair[1]) == (body, [])
    sender.join()


class InterruptedLoad:
    """Raises KeyboardInterrupt when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return signal.raise_signal, (signal.SIGINT,)


def test_an_interrupt_between_frame_and_body_closes_the_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    """The caller does not have them yet."""
    reader, writer = os.pipe()
    fd_socket.send(pair[0], InterruptedLoad(), [reader])
    num_before = num_descriptors()
    with pytest.raises(KeyboardInterrupt):
        fd_socket.receive(pair[1])
    assert num_descriptors() == num_before
    os.close(reader)
    os.close(writer)


def test_wire_receive_raises_closed_at_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """A closed end and a frame cut in two are the same: the other side is gone; its descriptors are closed."""
    pair[0].close()
    with pytest.raises(fd_socket.Closed):
        fd_socket.receive(pair[1])


def test_wire_receive_closes_the_descriptors_of_a_frame_that_was_cut(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The sender died in the middle of a frame."""
    before = num_descriptors()
    socket.send_fds(pair[0], [struct.pack("!II", 1000, 2) + b"half"], [0, 0])
    pair[0].close()
    with pytest.raises(fd_socket.Closed):
        fd_socket.receive(pair[1])
    assert num_descriptors() == before - 1


def test_wire_receive_takes_nothing_for_the_end_when_non_blocking(pair: tuple[socket.socket, socket.socket]) -> None:
    """Messages of a dead process are read, without waiting for a forked process that holds the other end."""
    fd_socket.send(pair[0], "last words")
    pair[1].setblocking(False)
    assert fd_socket.receive(pair[1]) == ("last words", [])
    with pytest.raises(fd_socket.Closed):
        fd_socket.receive(pair[1])


def test_wire_send_raises_closed_when_nobody_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    """Writing to a process that has exited raises the same error."""
    pair[1].close()
    with pytest.raises(fd_socket.Closed):
        fd_socket.send(pair[0], "anybody?")


def test_wire_send_refuses_more_descriptors_than_a_frame_holds(pair: tuple[socket.socket, socket.socket]) -> None:
    """They would be lost on the way."""
    with pytest.raises(ValueError, match="17 descriptors in one frame, at most 16"):
        fd_socket.send(pair[0], "many", [0] * 17)


def test_wire_receive_says_that_the_limit_of_open_files_is_reached(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel drops descriptors silently then; the ones that came are closed."""
    before = num_descriptors()
    socket.send_fds(pair[0], [struct.pack("!II", 4, 2) + b"N.\n\n"], [0])
    with pytest.raises(OSError, match="2 descriptors were sent and 1 came: the limit of open files") as error:
        fd_socket.receive(pair[1])
    assert error.value.errno == errno.EMFILE  # `explain_limit` reads it
    assert num_descriptors() == before
