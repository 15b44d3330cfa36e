# SPDX-License-Identifier: Apache-2.0
"""What an exception says."""

from __future__ import annotations

from ddpilot.launching.exceptions import leave_out_guard, message_of, shorten_message
from ddpilot.launching.victims import is_victim


class MuteError(OSError):
    """One that cannot say what it is about."""

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
        '  File "/x/ddpilot/guard/wrappers.py", line 91, in wrapper\n'
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
