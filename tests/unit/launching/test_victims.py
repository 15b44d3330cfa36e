# SPDX-License-Identifier: Apache-2.0
"""Errors that follow from another rank's end."""

from __future__ import annotations

import pytest

from ddpilot.errors import RemoteRankError
from ddpilot.launching.victims import is_victim

# Texts as gloo, NCCL and torch's store wrote them.
VICTIM_TEXTS = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3456",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:4: Connection reset by peer",
    "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "[enforce fail at tcp/unbound_buffer.cc:84] . Timed out waiting 1800000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "NCCL error: remote process exited or there was a network error, ncclRemoteError",
    "Broken pipe",
]


@pytest.mark.parametrize("text", VICTIM_TEXTS)
def test_is_victim_knows_the_texts_of_lost_connections(text: str) -> None:
    """What a rank says whose peer went away may be a consequence."""
    assert is_victim(RuntimeError(text))


def test_is_victim_takes_what_was_raised_from_a_victim_for_one() -> None:
    """User code that wraps the error in another one does not become a cause by that."""
    error = KeyError("step failed")
    error.__cause__ = RuntimeError(VICTIM_TEXTS[0])
    assert is_victim(error)
    while_handling = ValueError("cleanup failed")
    while_handling.__context__ = ConnectionResetError("Connection reset by peer")
    assert is_victim(while_handling)
    while_handling.__suppress_context__ = True
    assert not is_victim(while_handling)


def test_is_victim_takes_an_error_that_another_rank_raised_for_one() -> None:
    """`on_ranks` raises on every rank what one of them raised."""
    assert is_victim(RemoteRankError("running `f` on rank 1", found="it raised ValueError"))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        FileNotFoundError("no such file: data.csv"),
        KeyError("loss"),
    ],
)
def test_is_victim_takes_everything_else_for_a_possible_cause(error: Exception) -> None:
    """Ordinary errors, and a lost connection's words in an error that no connection raises."""
    assert not is_victim(error)


def test_is_victim_ends_on_a_chain_that_is_a_circle() -> None:
    """Two errors that name each other as cause are looked at once."""
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_victim(first)
