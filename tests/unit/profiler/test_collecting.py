# SPDX-License-Identifier: Apache-2.0
"""How the files of nodes come to node 0, over a real connection."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from ddpilot.errors import RecordError
from ddpilot.profiler.collecting import receive_files, send_files
from tests.ports import kept_port


def make(folder: Path, **contents: bytes) -> Path:
    """A folder with files."""
    folder.mkdir()
    for name, content in contents.items():
        (folder / name.replace("_dot_", ".")).write_bytes(content)
    return folder


def test_files_of_ranks_and_traces_arrive_and_nothing_else_does(tmp_path: Path) -> None:
    """A stranger that connects first is dropped; a journal is not sent."""
    here, traces = make(tmp_path / "a"), make(tmp_path / "traces")
    there = make(tmp_path / "b", rank1_dot_spans_dot_bin=b"s" * 3_000_000, rank1_dot_journal=b"j")
    theirs = make(tmp_path / "c", trace_rank_1_dot_json_dot_gz=b"t")

    def send(port: int) -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                break
            except ConnectionRefusedError:
                continue
        send_files([there, theirs], "127.0.0.1", port, node_rank=1, run="job")

    with kept_port() as port:
        sender = threading.Thread(target=send, args=(port,))
        sender.start()
        receive_files(here, traces, "127.0.0.1", port, nnodes=2, run="job", limit_s=20)
        sender.join()
    assert {path.name: path.stat().st_size for path in here.iterdir()} == {"rank1.spans.bin": 3_000_000}
    assert [path.name for path in traces.iterdir()] == ["trace_rank_1.json.gz"]


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    """On node 0 by its rank, on the other by the address of node 0."""
    with kept_port() as port:
        with pytest.raises(RecordError, match="nodes 1, 2 did not send the files of their ranks within 0.05 s"):
            receive_files(tmp_path, None, "127.0.0.1", port, nnodes=3, run="job", limit_s=0.05)
        with pytest.raises(RecordError, match=f"127.0.0.1:{port} did not take it within 0.05 s"):
            send_files([tmp_path], "127.0.0.1", port, node_rank=1, run="job", limit_s=0.05)
