# SPDX-License-Identifier: Apache-2.0
"""Main function of a host process, which ssh or srun has started: connect to the parent, then serve it."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from ddpilot.session.host.host import Host, ssh_address
from ddpilot.session.nodes.link import Link, PipeStream, Stream
from ddpilot.session.nodes.messages import MAGIC
from ddpilot.session.nodes.tls import CANNOT_CONNECT, connect

_SILENCE_S = 60.0
"""Seconds without a sign of life of the parent after which the ranks are ended: a parent may be suspended for a while,
but the machine that it ran on may also be gone."""

_MAX_LINE_BYTES = 1 << 20


def main() -> None:
    """Read how to reach the parent from standard input, connect, and serve until the connection ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line, rest = _read_line()
    given: dict[str, Any] = json.loads(line)
    node_rank = int(os.environ["SLURM_NODEID"]) if given["node_rank"] is None else given["node_rank"]
    reader, writer = _own_pipes()
    if given["port"] is None:
        reached_at = ssh_address()
        stream: Stream = PipeStream(reader, writer)
        stream.write(MAGIC)
    else:
        try:
            stream = connect(
                given["addresses"], given["port"], given["certificate"], given["keys"][node_rank], node_rank
            )
        except OSError as error:
            raise SystemExit(f"ddpilot: {CANNOT_CONNECT}: {error}") from None
        reached_at = stream.address
        os.close(reader)
        os.close(writer)
        rest = b""
    link = Link(stream, silence_s=_SILENCE_S, received=rest)
    Host(link, node_rank, reached_at, given["directory"], given["num_nodes"]).run()
    os._exit(0)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def _read_line() -> tuple[bytes, bytes]:
    """Return the first line of standard input, and the bytes after it that were read with it."""
    data = b""
    while b"\n" not in data and len(data) < _MAX_LINE_BYTES:
        part = os.read(0, 65536)
        if not part:
            raise SystemExit("ddpilot: the notebook has left before this node was ready")
        data += part
    line, _, rest = data.partition(b"\n")
    return line, rest


def _own_pipes() -> tuple[int, int]:
    """Return descriptors of what were standard input and output; nothing else reads or writes there any more."""
    reader, writer = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.flush()
    return reader, writer
