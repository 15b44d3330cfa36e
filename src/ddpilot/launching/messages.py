# SPDX-License-Identifier: Apache-2.0
"""What an exception says, also where its own `__str__` fails."""

from __future__ import annotations

import re

_MAX_HEADLINE_LINES = 3
_GUARD_FRAME = re.compile(
    r'^([ \t]*)File "[^"\n]*/ddpilot/guard/[^"\n]*", line \d+, in .*\n(?:\1[ \t].*\n)*', re.MULTILINE
)


def message_of(error: BaseException) -> str:
    """`str(error)`; where that raises, what Python's own tracebacks say then."""
    try:
        return str(error)
    except Exception as failure:  # the user's code, and what is to be told is the error, not this
        return f"<exception str() failed: {type(failure).__name__}>"


def leave_out_guard(text: str) -> str:
    """`text` without the frames of guard's wrappers, in tracebacks that another process has made text of."""
    return _GUARD_FRAME.sub("", text)


def shorten_message(message: str) -> str:
    """A message in one line or two, for a headline: of more lines the first and the last that have text."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return message if len(lines) <= _MAX_HEADLINE_LINES else f"{lines[0]} ... {lines[-1]}"
