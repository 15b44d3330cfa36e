# SPDX-License-Identifier: Apache-2.0
"""Parcels are sent through a socket of the session; those of interrupted requests are dropped."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import MemoryWriter
from ddpilot.session.protocol.large_values import ParcelCall, ParcelPort


def test_take_gives_the_parcel_of_the_token_and_drops_older_ones() -> None:
    """An interrupted request leaves its parcel in the socket; a closed one leaves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parcels"
        port = ParcelPort(path)
        readers = []
        calls = []
        for number in range(3):
            reader, writer = os.pipe()
            os.write(writer, b"%d" % number)
            os.close(writer)
            readers.append(reader)
            calls.append(ParcelCall(path, f"token{number}", reader))
        calls[0].close()
        channel, fd = port.take("token2")
        assert fd is not None
        assert os.read(fd, 10) == b"2"
        reply = MemoryWriter("test-reply")
        reply.write(b"reply")
        sealed = reply.seal()
        fd_socket.send(channel, None, [sealed])
        channel.close()
        num_before = len(os.listdir("/proc/self/fd"))
        answer = calls[2].answer()
        assert answer is not None
        assert bytes(answer) == b"reply"
        assert len(os.listdir("/proc/self/fd")) == num_before, "the mapping keeps no descriptor, which could be lost"
        fd_socket.close_all([fd, sealed, *readers])
        for call in calls:
            call.close()
        port.close()


def test_a_rank_that_was_interrupted_before_it_took_a_parcel_leaves_no_answer_to_wait_for() -> None:
    """Nor one that hung up; the parcel lies in its port until the next request."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parcels"
        port = ParcelPort(path)
        call = ParcelCall(path, "never taken", None)
        assert call.answer() is None
        taken = ParcelCall(path, "taken", None)
        channel, _ = port.take("taken")
        channel.close()
        assert taken.answer() is None
        for one in (call, taken):
            one.close()
        port.close()
