# SPDX-License-Identifier: Apache-2.0
"""Send the files of a node's ranks to node 0 after a job on several nodes. Does not import torch.

Node 0 listens once more at the address at which the nodes have met for the job, which the others can reach.
"""

from __future__ import annotations

import gc
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpilot.errors import RecordError, RendezvousError
from ddpilot.group.address import listen

LIMIT_S = 60.0
"""Seconds that nodes wait for each other."""
_PAUSE_S = 0.1
_LENGTH = struct.Struct("!Q")
_MAX_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_NAME = re.compile(
    r"(rank\d+\.(spans\.bin|updates\.bin|memory\.bin|counts\.bin|buckets\.bin|marks\.bin|facts\.jsonl)|trace_rank_\d+(_\d+)?\.json\.gz)"
)
_DONE = b"k"


def send_files(
    folders: list[Path], addr: str, port: int, *, node_rank: int, run: str, limit_s: float = LIMIT_S
) -> None:
    """Send what the ranks of this node have recorded into `folders` to node 0, which has called `receive_files`.

    `run`: the same on all nodes. Raises RecordError if node 0 does not take them within `limit_s`.
    """
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)]
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((addr, port), timeout=3.0) as connection:
                connection.settimeout(limit_s)
                _send(connection, paths, {"run": run, "node": node_rank})
                if connection.recv(1) != _DONE:
                    raise ConnectionResetError("node 0 closed the connection")
                return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RecordError(
                    f"sending the profile of node {node_rank} to node 0",
                    found=f"{addr}:{port} did not take it within {limit_s:g} s ({error})",
                    fix="Read the output of node 0: it may have failed, or a firewall blocks the port",
                ) from error
        time.sleep(_PAUSE_S)


def _send(connection: socket.socket, paths: list[Path], about: dict[str, Any]) -> None:
    header = json.dumps({**about, "files": [[path.name, path.stat().st_size] for path in paths]}).encode()
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for path in paths:
        with path.open("rb") as file:
            connection.sendfile(file)


def receive_files(
    folder: Path, traces: Path | None, addr: str, port: int, *, nnodes: int, run: str, limit_s: float = LIMIT_S
) -> None:
    """On node 0: take the files of the other nodes' ranks into `folder`, and traces into `traces`.

    Raises RecordError if a node does not send its files within `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    missing = set(range(1, nnodes))
    with _open(addr, port, deadline_s) as listener:
        while missing:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                names = ", ".join(map(str, sorted(missing)))
                raise RecordError(
                    "collecting the profile of all nodes",
                    found=f"node{'s' * (len(missing) > 1)} {names} did not send the files of their ranks "
                    f"within {limit_s:g} s",
                    fix="Start `ddpilot profile` on every node with the same options, but for --node-rank",
                ) from error
            # A node that is cut off tries again; something else that connects is dropped.
            with connection, suppress(OSError, ValueError):
                connection.settimeout(limit_s)
                missing.discard(_receive(connection, folder, traces, run))


def _open(addr: str, port: int, deadline_s: float) -> socket.socket:
    while True:
        gc.collect()  # the job's store listens here until the last reference to it is gone
        try:
            listener = listen(addr, port)
        except RendezvousError:
            if time.monotonic() > deadline_s:
                raise
            listener = None
        if listener is not None:
            return listener
        if time.monotonic() > deadline_s:
            found = f"this process still listens on port {port}"
            raise RecordError("collecting the profile of all nodes", found=found, fix="Choose another --master-port")
        time.sleep(_PAUSE_S)


def _receive(connection: socket.socket, folder: Path, traces: Path | None, run: str) -> int:
    """Take the files of one node, and return its rank. Raises ValueError for anything else than such a node."""
    length = _LENGTH.unpack(b"".join(_read(connection, _LENGTH.size)))[0]
    if length > _MAX_HEADER_BYTES:
        raise ValueError("not a node of this job")
    header = json.loads(b"".join(_read(connection, length)))
    if not isinstance(header, dict) or header.get("run") != run:
        raise ValueError("not a node of this job")
    for name, size in header["files"]:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a file named {name!r}")
        place = traces if name.startswith("trace") else folder
        if place is None:
            raise ValueError("a trace, where none was asked for")
        path = place / name
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            for chunk in _read(connection, size):
                file.write(chunk)
        part.replace(path)  # a shared folder has the file already, which its node may still be reading
    connection.sendall(_DONE)
    return int(header["node"])


def _read(connection: socket.socket, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        chunk = connection.recv(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ConnectionResetError("the other node closed the connection")
        num_bytes -= len(chunk)
        yield chunk
