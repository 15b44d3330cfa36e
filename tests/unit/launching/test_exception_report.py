# SPDX-License-Identifier: Apache-2.0
"""Reports on exceptions."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.errors import GroupError
from ddpilot.launching.exception_report import prune_guard, report_exception, user_traceback
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
