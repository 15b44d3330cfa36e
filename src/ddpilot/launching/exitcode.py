# SPDX-License-Identifier: Apache-2.0
"""Exit code of a process that ends with an exception."""

from __future__ import annotations


def exitcode_of(error: BaseException) -> int:
    """Exit code, 0 to 255: a `SystemExit`'s own code (0 for a bare `sys.exit()`), 1 for any other exception."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
