# SPDX-License-Identifier: Apache-2.0
"""What a rank that could not enter a group was connected to."""

from __future__ import annotations

import socket

import pytest

from ddpilot.launching.unjoined import show_connections


def init_process_group() -> None:
    """Fails as torch's does where a rank does not come."""
    raise TimeoutError("wait timeout after 60000ms")


def test_show_connections_names_both_ends_after_a_failed_init_process_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The store's connection is there, with its state; an error from elsewhere shows nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        port = server.getsockname()[1]
        with pytest.raises(TimeoutError) as caught:
            init_process_group()
        show_connections(caught.value)
        said = capsys.readouterr().err
        show_connections(ValueError("of the user's own code"))
    assert said.startswith("ddpilot: TCP connections of this rank: ")
    assert f"127.0.0.1:{port} LISTEN" in said
    assert f" to 127.0.0.1:{port} ESTABLISHED" in said
    assert capsys.readouterr().err == ""
