# SPDX-License-Identifier: Apache-2.0
"""Messages between kernels of a node and the parent."""

from __future__ import annotations

from pathlib import Path

import zmq

from ddpilot.session.host.relay import HostLoop, KernelRelay
from ddpilot.session.nodes.messages import KernelFrames


def test_messages_for_a_kernel_wait_until_its_process_was_started(tmp_path: Path) -> None:
    """In their order; no socket tries to connect before."""
    relay = KernelRelay(HostLoop(lambda: None, 1.0, lambda: False), tmp_path, lambda _: None, lambda *_: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kernel = context.socket(zmq.ROUTER)
    kernel.linger = 0
    kernel.rcvtimeo = 10_000
    try:
        relay.prepare(3, "k", b"key")
        kernel.bind(f"ipc://{tmp_path}/k-1")
        relay.send(KernelFrames(3, "shell", [b"first"]))
        relay.send(KernelFrames(3, "shell", [b"second"]))
        assert relay._sockets == {}
        relay.connect(3)
        relay.send(KernelFrames(3, "shell", [b"third"]))
        assert [kernel.recv_multipart()[1] for _ in range(3)] == [b"first", b"second", b"third"]
    finally:
        relay.close([3])
        kernel.close()
        context.term()


def test_a_kernel_whose_process_was_not_started_gets_no_messages(tmp_path: Path) -> None:
    """Its process could not be created, which is reported; a later one of the same rank starts without them."""
    relay = KernelRelay(HostLoop(lambda: None, 1.0, lambda: False), tmp_path, lambda _: None, lambda *_: None)
    try:
        relay.prepare(3, "k0", b"key")
        relay.disconnect(3)
        relay.send(KernelFrames(3, "shell", [b"lost"]))
        relay.prepare(3, "k1", b"key")
        assert relay._starting[3][1] == []
    finally:
        relay.close([3])
