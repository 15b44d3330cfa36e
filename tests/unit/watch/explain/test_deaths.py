# SPDX-License-Identifier: Apache-2.0
"""Of several findings, the one that ends ranks which wait for others."""

from __future__ import annotations

from typing import Literal

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.watch.explain.deaths import find_cause_of_end


def finding(code: str, severity: Literal["error", "warning"] = "error", rank: int = 0) -> Finding:
    """One with this code, about `rank`."""
    return Finding(code=code, name="name", severity=severity, summary="", ranks=(rank,), why="", fix="", source="")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], None),
        ([finding("DDP404"), finding("DDP208"), finding("DDP209")], "DDP208"),
        ([finding("DDP204")], None),
        ([finding("DDP218", "warning")], None),
        ([finding("DDP209", rank=1)], None),
        ([finding("DDP202", rank=1)], "DDP202"),
    ],
)
def test_the_cause_of_an_end_is_an_error_that_keeps_ranks_from_going_on(
    found: list[Finding], expected: str | None
) -> None:
    """Neither what guard says, nor another reduce-op, nor what may still end well, nor its own end."""
    cause = find_cause_of_end(found, rank=1)
    assert (cause.code if cause is not None else None) == expected
