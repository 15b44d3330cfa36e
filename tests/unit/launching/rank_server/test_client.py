# SPDX-License-Identifier: Apache-2.0
"""One rank as the parent sees it."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from ddpilot.launching.rank_reports import RankStart
from ddpilot.launching.rank_server.client import start_rank
from ddpilot.launching.rank_server.job import Start
from ddpilot.launching.shipping import fd_socket

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
    job, server = socket.socketpair()
    parcel = os.open(os.devnull, os.O_RDONLY)
    handle = start_rank(job, START, parcel)
    request, (control_fd, out, err) = fd_socket.receive(server)
    assert request == Start(1)
    control = socket.socket(fileno=control_fd)
    start, (parcel_there,) = fd_socket.receive(control)
    assert start == START
    os.write(out, b"out")
    os.write(err, b"err")
    assert (os.read(handle.pipes["stdout"], 9), os.read(handle.pipes["stderr"], 9)) == (b"out", b"err")
    handle.close()
    handle.close()
    fd_socket.close_all([out, err, parcel, parcel_there])
    for end in (job, server, control):
        end.close()
    assert num_descriptors() == before


def test_start_rank_closes_everything_when_the_server_is_gone() -> None:
    """It raises Closed and leaves no descriptor open."""
    before = num_descriptors()
    job, server = socket.socketpair()
    server.close()
    with pytest.raises(fd_socket.Closed):
        start_rank(job, START, 0)
    job.close()
    assert num_descriptors() == before


def test_start_rank_leaves_nothing_open_if_the_system_has_no_descriptors_left() -> None:
    """Whichever of a rank's channels was the one too many."""
    job, server = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with job, server:
        before = set(os.listdir("/proc/self/fd"))
        next_fd = os.dup(0)
        os.close(next_fd)
        for spare in range(6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + spare, limits[1]))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    start_rank(job, START, 0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert set(os.listdir("/proc/self/fd")) == before
