# SPDX-License-Identifier: Apache-2.0
"""Freeing what devices do: communicators are aborted at the same time, and no optimizer steps afterwards."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from ddpilot.errors import GroupError
from ddpilot.group import teardown
from ddpilot.group.teardown import (
    Freed,
    OpenSocket,
    abort_all,
    allow_steps,
    find_gloo_sockets,
    find_store_sockets,
    free_group,
    shut,
)
from ddpilot.launching.exception_report import is_victim


@pytest.fixture(autouse=True)
def cache_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the first optimizer of a process would set this variable."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor")


class World:
    """A default group."""


def test_abort_all_aborts_communicators_that_wait_for_each_other() -> None:
    """The first returns only when the second one is aborted as well."""
    both = threading.Barrier(2)

    def meet() -> None:
        both.wait()

    began_s = time.monotonic()
    assert abort_all({"0": meet, "1": meet}, 5.0) == (("0", "1"), ())
    assert time.monotonic() - began_s < 4.0  # and not once the limit of the first has passed


def test_abort_all_reports_what_fails_and_what_does_not_return() -> None:
    """The other groups are aborted all the same, and the limit is kept."""
    gate = threading.Event()

    def fail() -> None:
        raise RuntimeError("NCCL error 3\nmore")

    def wait() -> None:
        gate.wait()

    aborted, failures = abort_all({"b": fail, "a": wait, "c": lambda: None}, 0.01)
    gate.set()
    assert aborted == ("c",)
    assert failures == (
        "aborting group 'a' has not returned after 0.01 s: end this rank",
        "aborting group 'b' failed: NCCL error 3",
    )


def test_abort_all_aborts_also_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit handler of Python 3.12 and later can start none: one after the other then."""
    aborts: list[str] = []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert abort_all({"0": lambda: aborts.append("0"), "1": lambda: aborts.append("1")}, 1.0) == (("0", "1"), ())
    assert aborts == ["0", "1"]


def test_free_group_without_a_group_aborts_nothing_and_lets_optimizers_step() -> None:
    """Harmless."""
    assert free_group() == Freed()
    _step()


def test_no_optimizer_steps_between_freeing_a_device_and_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the device returns partial sums without an error; a step with those raises, at once."""
    aborts: list[str] = []
    fake = SimpleNamespace(group=SimpleNamespace(WORLD=World()), get_rank=lambda: 3)
    monkeypatch.setattr(teardown, "dist", fake)
    monkeypatch.setattr(
        teardown, "_device_backends", lambda: iter([("0", SimpleNamespace(abort=lambda: aborts.append("0")))])
    )
    try:
        assert free_group().aborted == ("0",)
        assert aborts == ["0"]
        with pytest.raises(GroupError, match=r"\[rank 3\].*was freed while this rank trained") as caught:
            _step()
        assert is_victim(caught.value)
        fake.group.WORLD = None  # as after destroy_process_group in user code
        _step()
        fake.group.WORLD = World()
        free_group()
        with pytest.raises(GroupError):
            _step()
    finally:
        allow_steps()
    _step()


def test_a_first_collective_on_a_device_is_reported_as_what_cannot_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator then, in a call that has nothing yet to abort."""
    inside, gate = threading.Event(), threading.Event()

    def wait(*_: Any) -> bool:
        inside.set()
        return gate.wait()

    monkeypatch.setattr(c10d, "_rank_not_in_group", wait)  # as a collective asks, in torch's code
    caller = threading.Thread(target=c10d.get_rank, args=("a group",), name="caller")
    caller.start()
    try:
        assert inside.wait(5)
        (reason,) = teardown._unfreeable(["0"])
        assert list(teardown._unfreeable([])) == []
    finally:
        gate.set()
        caller.join()
    assert reason.startswith("thread 'caller' may be in the first collective of group 0 on its device, which ends only")


def test_has_communicator_asks_the_backend_inside_torchs_wrapper() -> None:
    """NCCL reports it; other backends do not."""
    made, unmade = (SimpleNamespace(_is_initialized=lambda made=made: made) for made in (True, False))
    assert teardown._has_communicator(made)
    assert not teardown._has_communicator(SimpleNamespace(wrapped_pg=unmade))
    assert teardown._has_communicator(SimpleNamespace())


def _step() -> None:
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()


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
    """Not the server's end, and not a connection to a different port."""
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
    """Listening sockets keep listening."""
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
