# SPDX-License-Identifier: Apache-2.0
"""Facts about exceptions."""

from __future__ import annotations

import socket

import pytest

from ddpilot.errors import RemoteRankError
from ddpilot.launching.exceptions import (
    exitcode_of,
    is_victim,
    leave_out_guard,
    message_of,
    shorten_message,
    show_connections,
)


class MuteError(OSError):
    """An exception with a `__str__` that raises."""

    def __str__(self) -> str:
        """Fails."""
        raise TypeError("no words")


def test_message_of_is_the_exceptions_text() -> None:
    """As `str` gives it."""
    assert message_of(ValueError("wrong")) == "wrong"


def test_message_of_an_exception_whose_text_fails_says_so() -> None:
    """What is raised by that would hide the error itself."""
    assert message_of(MuteError()) == "<exception str() failed: TypeError>"
    assert not is_victim(MuteError())


def test_leave_out_guard_leaves_the_frames_of_others() -> None:
    """As a worker of a `DataLoader` writes them into its message."""
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/x/ddpilot/guard/probe.py", line 91, in wrapper\n'
        "    result = original(*args, **kwargs)\n             ^^^^^^^^^\n"
        '  File "/x/torch/fetch.py", line 52, in fetch\n    data = 1\nKeyError: 3'
    )
    left = leave_out_guard(text)
    assert "guard" not in left
    assert left.splitlines()[2:] == ['  File "/x/torch/fetch.py", line 52, in fetch', "    data = 1", "KeyError: 3"]


def test_shorten_message_has_the_first_and_the_last_line_of_many() -> None:
    """Up to three stay as they are."""
    assert shorten_message("one\ntwo\nthree") == "one\ntwo\nthree"
    assert shorten_message("Caught\n  File 1\n  File 2\nKeyError: 3\n") == "Caught ... KeyError: 3"


@pytest.mark.parametrize(
    ("error", "exitcode"),
    [(SystemExit(), 0), (SystemExit(3), 3), (SystemExit(256 + 7), 7), (SystemExit("no data"), 1), (ValueError("x"), 1)],
)
def test_exitcode_of_is_pythons(error: BaseException, exitcode: int) -> None:
    """A bare `sys.exit()` is a good end, and a text stands for 1."""
    assert exitcode_of(error) == exitcode


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
    """A lost connection may be a consequence of a failed peer."""
    assert is_victim(RuntimeError(text))


def test_is_victim_takes_what_was_raised_from_a_victim_for_one() -> None:
    """An error of user code that was raised from a victim's error is not a cause."""
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
