# SPDX-License-Identifier: Apache-2.0
"""A rank's output stream, on ipykernel's real sockets and without its thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread
from jupyter_client.session import Session

from ddpilot.session.rank.main import RankStream


class Counted(RankStream):
    """Counts how often ipykernel's flush was asked for."""

    num_flushes = 0

    def _flush(self) -> None:
        self.num_flushes += 1
        super()._flush()  # type: ignore[no-untyped-call]


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream to a socket that nobody reads. As its thread is not started, it flushes at once."""
    context = zmq.Context()
    thread: Any = IOPubThread(context.socket(zmq.PUB))  # type: ignore[no-untyped-call]
    stream: Any = Counted(Session(), thread, "stdout", watchfd=False)  # type: ignore[no-untyped-call]
    yield stream
    stream.close()
    thread.close()
    thread.io_loop.close(all_fds=True)
    context.destroy()


def test_only_a_flush_after_output_does_something(stream: Any) -> None:
    """ipykernel flushes both streams three times per cell."""
    stream.flush()
    assert stream.num_flushes == 0
    stream.write("a")
    stream.flush()
    stream.flush()
    assert stream.num_flushes == 1
    assert not list(stream._flush_buffers())
    stream.writelines(["b", "c"])
    stream.flush()
    assert stream.num_flushes == 2


def test_a_lone_surrogate_can_be_sent(stream: Any) -> None:
    """It is replaced, as UTF-8 cannot encode it."""
    stream.write("a\udc80")
    ((_, text),) = stream._flush_buffers()
    assert text.encode()
    with pytest.raises(TypeError, match="must be str"):
        stream.write(1)
