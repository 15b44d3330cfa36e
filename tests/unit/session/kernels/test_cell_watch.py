# SPDX-License-Identifier: Apache-2.0
"""What is seen of one cell."""

from __future__ import annotations

import pytest

from ddpilot.session.kernels.cell_watch import as_counted


@pytest.mark.parametrize(
    ("code", "counted"),
    [("\n  \nx = 1\n\ny = 2\n", "x = 1\n\ny = 2\n"), ("x = 1", "x = 1"), ("\n", "")],
)
def test_lines_of_a_cell_are_counted_from_the_first_that_is_not_empty(code: str, counted: str) -> None:
    """As IPython does, so that the lines of collectives are found in it."""
    assert as_counted(code) == counted
