# SPDX-License-Identifier: Apache-2.0
"""Message of an exception, even if its own `__str__` raises."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MAX_HEADLINE_LINES = 3
_GUARD_FRAME = re.compile(
    r'^([ \t]*)File "[^"\n]*/ddpilot/guard/[^"\n]*", line \d+, in .*\n(?:\1[ \t].*\n)*', re.MULTILINE
)

_UNSENT = "the outcome of `{}` cannot be sent ("


def render_unsent(rank: int, function_name: str, reason: str) -> str:
    """Line for stderr: neither value nor error of a rank can be sent to the parent; `find_unsent` finds it there."""
    return (
        f"ddpilot: rank {rank}: {_UNSENT.format(function_name)}{reason}): the program closed descriptors that are not "
        "its own, as `os.closerange` does when a process becomes a daemon. Close only what you opened\n"
    )


def find_unsent(lines: Sequence[str], function_name: str) -> bool:
    """True if a line of `render_unsent` is in `lines`."""
    return any(line.startswith("ddpilot: rank ") and _UNSENT.format(function_name) in line for line in lines)


def message_of(error: BaseException) -> str:
    """`str(error)`, or the placeholder of Python's own tracebacks if that raises."""
    try:
        return str(error)
    except Exception as failure:  # `__str__` is user code; the error itself has to be reported, not this failure
        return f"<exception str() failed: {type(failure).__name__}>"


def leave_out_guard(text: str) -> str:
    """Remove the frames of guard's wrappers from tracebacks that another process formatted as text."""
    return _GUARD_FRAME.sub("", text)


def shorten_message(message: str) -> str:
    """Shorten a message for a headline: more than 3 non-empty lines become the first and the last one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return message if len(lines) <= _MAX_HEADLINE_LINES else f"{lines[0]} ... {lines[-1]}"
