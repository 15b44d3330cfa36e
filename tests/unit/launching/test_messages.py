# SPDX-License-Identifier: Apache-2.0
"""What an exception says."""

from __future__ import annotations

from ddpilot.launching.messages import message_of
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
