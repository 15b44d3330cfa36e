# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a session's sockets, and the messages of a kernel on them."""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import pytest
import zmq
from jupyter_client.session import Session as Messages

from ddpilot.session.kernels.io_thread import Channels, IOThread
from ddpilot.session.kernels.sockets import Connection


def test_io_thread_call_waits_for_a_long_callback() -> None:
    """Longer than the interval at which it checks that the thread is alive, also on Python 3.10."""
    io_thread = IOThread(lambda event: None, lambda now: None, lambda error: None)
    io_thread.start()
    try:
        assert io_thread.call(lambda: threading.Event().wait(0.25)) is False
    finally:
        io_thread.stop()


def test_channels_receive_signed_messages_only() -> None:
    """With content and buffers; one that is signed with a different key is refused."""
    context: zmq.Context[Any] = zmq.Context()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        connection = Connection(f"{folder}/k", b"key")
        with context.socket(zmq.ROUTER) as kernel:
            kernel.bind(connection.url("shell"))
            channels = Channels(context, 3, connection)
            asked = channels.make("ask", {})
            channels.send("shell", asked)
            ident = kernel.recv_multipart()[0]
            for key in (b"key", b"other"):
                Messages(key=key, signature_scheme="hmac-sha256").send(
                    kernel, "answer", {"text": "é"}, parent=asked, ident=ident, buffers=[b"raw"]
                )
            assert channels.sockets["shell"].poll(5000)
            received = channels.receive("shell")
            message = next(received)
            assert (message.rank, message.channel, message.kind) == (3, "shell", "answer")
            assert (message.parent_id, message.content) == (asked["header"]["msg_id"], {"text": "é"})
            assert message.buffers == [b"raw"]
            assert channels.sockets["shell"].poll(5000)
            with pytest.raises(ValueError, match="rank 3 sent a message with a wrong signature"):
                next(received)
            channels.close()
    context.term()
