# SPDX-License-Identifier: Apache-2.0
"""Finding and shutting sockets, on sockets of this process that are not torch's."""

from __future__ import annotations

import os
import select
import socket
import threading

from ddpilot.group.sockets import OpenSocket, find_gloo_sockets, find_store_sockets, shut


def test_find_gloo_sockets_finds_nothing_without_gloo() -> None:
    """A thread of the user's that waits exactly as gloo's does, on the user's own socket, is not taken for it."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as epoll:
        epoll.register(server.fileno(), select.EPOLLIN)

        def wait() -> None:
            while not stop.is_set():
                epoll.poll(0.01, 64)

        poller = threading.Thread(target=wait)
        poller.start()
        assert find_gloo_sockets() == []
        stop.set()
        poller.join()


def test_find_store_sockets_takes_clients_of_that_address_and_port_only() -> None:
    """Not the server's end, and not a connection to another port."""
    with _pair() as (near, far), _pair() as (other, _):
        address = near.getpeername()
        found = find_store_sockets([("localhost", address[1])])
        assert [entry.fd for entry in found] == [near.fileno()]
        assert find_store_sockets([("10.0.0.1", address[1])]) == []
        shut(found)
        assert far.recv(1) == b""
        other.sendall(b"works")


def test_shut_leaves_a_number_alone_that_another_socket_has_by_now() -> None:
    """A descriptor that was closed and used again since it was found is not that socket any more."""
    with _pair() as (near, far):
        shut([OpenSocket(near.fileno(), os.fstat(far.fileno()).st_ino)])
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    shut([OpenSocket(10**6, 1)])


def test_shut_leaves_a_listening_socket_alone() -> None:
    """What only listens goes on listening."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut([OpenSocket(server.fileno(), os.fstat(server.fileno()).st_ino)])
        socket.create_connection(server.getsockname()).close()


class _pair:  # noqa: N801  (used as a function)
    """Two ends of a loopback connection."""

    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.near = socket.create_connection(server.getsockname())
            self.far, _ = server.accept()
        return self.near, self.far

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.far.close()
