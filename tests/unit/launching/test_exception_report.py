# SPDX-License-Identifier: Apache-2.0
"""Reports on exceptions."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ddpilot.errors import GroupError, RemoteRankError
from ddpilot.launching.exception_report import (
    exitcode_of,
    is_victim,
    leave_out_guard,
    message_of,
    prune_guard,
    report_exception,
    shorten_message,
    show_connections,
    user_traceback,
)
from ddpilot.launching.rank_server import rank


def run(code: str, file: str, **names: Any) -> BaseException:
    """The exception that `code`, with `file` as its file name, raises with `names` as its globals."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(code, file, "exec"), names)
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without the frame of this function
    return caught.value


def call(function: Any, *args: Any) -> BaseException:
    """The exception of `function(*args)`, called from the file that calls it in a rank."""
    return run("function(*args)", rank.__file__, function=function, args=args)


def test_user_traceback_is_empty_if_the_call_itself_failed() -> None:
    """Arguments that the function does not take: no line of the function ran."""
    assert user_traceback(call(lambda: None, 3)) == ""


def test_user_traceback_starts_at_the_users_first_line() -> None:
    """The frame that calls the function is left out, those of the function are kept."""
    shown = user_traceback(call(lambda value: len(value), 3))
    assert rank.__file__ not in shown
    assert "len(value)" in shown
    assert "object of type 'int' has no len()" in shown


def test_user_traceback_starts_at_the_cell() -> None:
    """The frames of IPython above a cell are left out, those of libraries below it are kept."""
    library: dict[str, Any] = {}
    exec(compile("def read():\n    raise KeyError('k')", "/usr/lib/python3/dist-packages/x.py", "exec"), library)
    cell = compile("\nread()", "Cell In[7]", "exec")
    names = {"__name__": "IPython.core.interactiveshell", "cell": cell, "ns": dict(library)}
    lines = user_traceback(run("exec(cell, ns)", "/x/interactiveshell.py", **names)).splitlines()
    assert lines[1].strip() == 'File "Cell In[7]", line 2, in <module>'
    assert lines[2].strip() == 'File "/usr/lib/python3/dist-packages/x.py", line 2, in read'


def test_user_traceback_of_an_error_of_ddpilot_has_the_users_lines_only() -> None:
    """Its message is complete without them."""
    library = compile("def enter(error):\n    raise error", "/usr/lib/python3/dist-packages/torch/x.py", "exec")
    names: dict[str, Any] = {"error": GroupError("entering the group", found="rank 1 is missing")}
    exec(library, names)
    text = user_traceback(run("\nenter(error)", "Cell In[7]", **names))
    assert 'File "Cell In[7]", line 2, in <module>' in text
    assert "torch/x.py" not in text


def test_user_traceback_has_the_lines_of_a_syntax_error_in_the_script() -> None:
    """No frame is the user's, but the message has the line."""
    text = user_traceback(run("def read():\n    compile('1 +', 'train.py', 'exec')\nread()", rank.__file__))
    assert text.splitlines()[0] == '  File "train.py", line 1'
    assert text.splitlines()[-1] == "SyntaxError: invalid syntax"


def test_prune_guard_removes_frames_at_every_place_of_the_chain() -> None:
    """Outermost, in the middle, and in the cause."""
    guarded = "def wrapper(function):\n    return function()\nwrapper(function)"
    cause = run(guarded, "/x/ddpilot/guard/b.py", function=lambda: int("x"))
    error = run("raise ValueError from cause", "/x/ddpilot/guard/a.py", cause=cause)
    prune_guard(error)
    assert error.__traceback__ is None
    assert error.__cause__ is not None
    frames = error.__cause__.__traceback__
    assert frames is not None
    assert (frames.tb_frame.f_code.co_name, frames.tb_next) == ("<lambda>", None)


def test_report_exception_has_what_a_parent_needs() -> None:
    """A given text replaces the traceback; frames of guard in a message of another process are removed."""
    report = report_exception(call(lambda value: len(value), 3))
    assert (report.type_name, report.exitcode, report.interrupted, report.is_victim) == ("TypeError", 1, False, False)
    assert report.traceback.endswith("TypeError: object of type 'int' has no len()\n")
    report = report_exception(KeyboardInterrupt(), "text")
    assert (report.traceback, report.interrupted) == ("text", True)


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
