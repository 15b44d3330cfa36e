# SPDX-License-Identifier: Apache-2.0
"""What an exception says, also where its own `__str__` fails."""

from __future__ import annotations


def message_of(error: BaseException) -> str:
    """`str(error)`; where that raises, what Python's own tracebacks say then."""
    try:
        return str(error)
    except Exception as failure:  # the user's code, and what is to be told is the error, not this
        return f"<exception str() failed: {type(failure).__name__}>"
