# SPDX-License-Identifier: Apache-2.0
"""The exit code of an exception is the one that Python itself would end with."""

from __future__ import annotations

import pytest

from ddpilot.launching.exitcode import exitcode_of


@pytest.mark.parametrize(
    ("error", "exitcode"),
    [(SystemExit(), 0), (SystemExit(3), 3), (SystemExit(256 + 7), 7), (SystemExit("no data"), 1), (ValueError("x"), 1)],
)
def test_exitcode_of_is_pythons(error: BaseException, exitcode: int) -> None:
    """A bare `sys.exit()` is a good end, and a text stands for 1."""
    assert exitcode_of(error) == exitcode
