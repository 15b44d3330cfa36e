# SPDX-License-Identifier: Apache-2.0
"""The events of ranks, as a server that is a socket in this process causes them."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching import spawning
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_reports import Exited, RankStart, Returned
from ddpilot.launching.rank_server import job
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.pickling import open_parcel, pack_parcel
from ddpilot.launching.spawning import (
    SERVER_GONE,
    Ended,
    ForkedRanks,
    Reported,
    SpawnerEvent,
    Wrote,
    start_rank,
)


class Loop:
    """An event loop that runs while something is readable."""

    def __init__(self) -> None:
        self.sources: dict[Any, Callable[[], object]] = {}

    def watch(self, source: Any, ready: Callable[[], object]) -> None:
        """Add a file descriptor."""
        self.sources[source] = ready

    def unwatch(self, source: Any) -> None:
        """Remove a file descriptor."""
        self.sources.pop(source, None)

    def run(self) -> None:
        """Call what is ready until nothing is."""
        while True:
            with selectors.DefaultSelector() as selector:
                for source in self.sources:
                    selector.register(source, selectors.EVENT_READ)
                ready = [key.fd for key, _ in selector.select(0)]
            if not ready:
                return
            for fd in ready:
                if fd in self.sources:
                    self.sources[fd]()


class Server:
    """Stands for a rank server; `end` is its end of the channel."""

    hello = SimpleNamespace(dirty=None)

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        self.ours = ours

    @contextlib.contextmanager
    def job(self, *_: object) -> Iterator[socket.socket]:
        """The channel of the only launch."""
        with self.ours:
            yield self.ours

    def take_start(self) -> list[int]:
        """The descriptors of the next request, which is to start a process."""
        request, fds = fd_socket.receive(self.end)
        assert isinstance(request, job.Start)
        return fds

    def tell(self, message: Any) -> None:
        """Answer."""
        fd_socket.send(self.end, message)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server of the spawners of a test."""
    made = Server()
    monkeypatch.setattr(spawning, "ensure_server", lambda *_: made)
    before = len(os.listdir("/proc/self/fd"))
    with made.end:
        yield made
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the spawner has closed its end, and all that it opened


def start(server: Server, events: list[SpawnerEvent]) -> tuple[ForkedRanks, Loop, list[int]]:
    """A spawner that has started rank 0, and the server's descriptors of that rank: control, stdout, stderr."""
    spawner, loop = ForkedRanks(LaunchOptions(), {}, 1, print, {}), Loop()
    spawner.attach(loop, events.append)
    fd_socket.close_all(server.take_start())
    with open(os.devnull, "rb") as parcel:
        spawner.start(0, parcel.fileno(), "train", sources={}, restart=2)
    return spawner, loop, server.take_start()


def test_spawner_emits_everything_that_a_rank_wrote_and_reported_before_its_end(server: Server) -> None:
    """In this order, even if the exit is read first."""
    events: list[SpawnerEvent] = []
    spawner, loop, (control_fd, out, err) = start(server, events)
    with socket.socket(fileno=control_fd) as control:
        message, fds = fd_socket.receive(control)
        fd_socket.close_all(fds)
        assert message.environ["TORCHELASTIC_RESTART_COUNT"] == "2"
        server.tell(job.Started(0, 4711))
        loop.run()
        assert (spawner.pid(0), spawner.is_live(0)) == (4711, True)
        parcel, _ = pack_parcel("test", "value", [])
        os.write(out, b"line\n")
        fd_socket.send(control, Returned(1.5), [parcel])
        os.close(parcel)
    exited = Exited(rank=0, status=0, peak_memory_bytes=1, time_s=2.0)
    server.tell(exited)
    loop.sources[server.ours.fileno()]()
    started, reported, wrote, ended = events
    assert started == job.Started(0, 4711)
    assert isinstance(reported, Reported)
    assert reported.report == Returned(1.5)
    assert reported.parcel is not None
    assert open_parcel(reported.parcel)[0] == "value"
    assert (wrote, ended) == (Wrote(0, "stdout", b"line\n"), Ended(0, exited))
    assert (spawner.pid(0), spawner.is_live(0)) == (None, False)
    fd_socket.close_all([out, err])
    server.tell(job.Finished())
    spawner.close()
    spawner.close()
    assert loop.sources == {}


def test_spawner_emits_the_end_of_a_rank_that_got_no_process(server: Server) -> None:
    """The reason is the operating system's."""
    events: list[SpawnerEvent] = []
    spawner, loop, fds = start(server, events)
    fd_socket.close_all(fds)
    server.tell(job.NotStarted(0, "no memory"))
    loop.run()
    assert events == [Ended(0, None, "the system gave it no process: no memory")]
    server.tell(job.Finished())
    spawner.close()


def test_spawner_emits_the_end_of_all_ranks_when_the_server_has_exited(server: Server) -> None:
    """No rank can be started afterwards."""
    events: list[SpawnerEvent] = []
    spawner, loop, fds = start(server, events)
    fd_socket.close_all(fds)
    server.end.close()
    loop.run()
    assert events == [Ended(0, None, SERVER_GONE)]
    assert not spawner.can_start
    spawner.signal([0], 15, group=True)
    spawner.close()


def test_spawner_refuses_to_fork_a_server_that_cannot_be_forked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless any other way to start will do, which is noted."""
    monkeypatch.setattr(server, "hello", SimpleNamespace(dirty="importing `x` started 2 threads"), raising=False)
    with pytest.raises(LaunchError, match="cannot be forked safely: importing `x` started 2 threads"):
        ForkedRanks(LaunchOptions(start_method="fork"), {}, 1, print, {})
    notes: list[str] = []
    ForkedRanks(LaunchOptions(), {}, 1, notes.append, {})
    assert notes[0].startswith("importing `x` started 2 threads, so ranks start as fresh interpreters")
    server.ours.close()


START = RankStart(
    launch_id="abc",
    rank=1,
    environ={},
    working_directory="/",
    sys_path=[],
    argv=[],
    main={},
    num_threads=1,
    hooks=(),
    sources={},
    function_name="train",
)


def num_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_start_rank_asks_the_server_and_tells_the_rank_who_it_is() -> None:
    """The server gets control, stdout and stderr of the rank; what comes through them comes from the rank."""
    before = num_descriptors()
    channel, server = socket.socketpair()
    parcel = os.open(os.devnull, os.O_RDONLY)
    handle = start_rank(channel, START, parcel)
    request, (control_fd, out, err) = fd_socket.receive(server)
    assert request == job.Start(1)
    control = socket.socket(fileno=control_fd)
    start, (parcel_there,) = fd_socket.receive(control)
    assert start == START
    os.write(out, b"out")
    os.write(err, b"err")
    assert (os.read(handle.pipes["stdout"], 9), os.read(handle.pipes["stderr"], 9)) == (b"out", b"err")
    handle.close()
    handle.close()
    fd_socket.close_all([out, err, parcel, parcel_there])
    for end in (channel, server, control):
        end.close()
    assert num_descriptors() == before


def test_start_rank_closes_everything_when_the_server_is_gone() -> None:
    """It raises Closed and leaves no descriptor open."""
    before = num_descriptors()
    channel, server = socket.socketpair()
    server.close()
    with pytest.raises(fd_socket.Closed):
        start_rank(channel, START, 0)
    channel.close()
    assert num_descriptors() == before


def test_start_rank_leaves_nothing_open_if_the_system_has_no_descriptors_left() -> None:
    """Whichever of a rank's channels was the one too many."""
    channel, server = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with channel, server:
        before = set(os.listdir("/proc/self/fd"))
        next_fd = os.dup(0)
        os.close(next_fd)
        for spare in range(6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + spare, limits[1]))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    start_rank(channel, START, 0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert set(os.listdir("/proc/self/fd")) == before
