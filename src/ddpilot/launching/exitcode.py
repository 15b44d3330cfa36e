# SPDX-License-Identifier: Apache-2.0
"""The exit code that an exception ends a process with."""

from __future__ import annotations


def exitcode_of(error: BaseException) -> int:
    """As Python has it, 0 to 255: what `SystemExit` asks for, 0 for a bare `sys.exit()`, 1 for any other exception."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
