# SPDX-License-Identifier: Apache-2.0
"""What a rank reports of an exception."""

from __future__ import annotations

from typing import Any

import pytest

from ddpilot.launching.rank_server import rank
from ddpilot.launching.rank_server.rank import user_traceback


def call(function: Any, *args: Any) -> BaseException:
    """What `function` raises if it is called from the file of `launching.rank_server.rank`."""
    names: dict[str, Any] = {"function": function, "args": args}
    with pytest.raises(TypeError) as caught:
        exec(compile("function(*args)", rank.__file__, "exec"), names)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]  # this function's
    return caught.value


def test_user_traceback_is_empty_if_the_call_itself_failed() -> None:
    """A function that was given arguments it does not take has no line of its own in the traceback."""
    assert user_traceback(call(lambda: None, 3)) == ""


def test_user_traceback_begins_at_the_user_s_first_line() -> None:
    """The frame that calls the function is left out, the function's own are shown."""
    shown = user_traceback(call(lambda value: len(value), 3))
    assert rank.__file__ not in shown
    assert "len(value)" in shown
    assert "object of type 'int' has no len()" in shown
