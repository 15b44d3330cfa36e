# SPDX-License-Identifier: Apache-2.0
"""What a model is like is said in one cell, not in each that trains it."""

from __future__ import annotations

from ddpilot.findings.finding import Finding
from ddpilot.watch.repeated import Repeated


def find(code: str, *evidence: str, ranks: tuple[int, ...] = (0, 1)) -> Finding:
    """A warning."""
    return Finding(code=code, name="a-name", severity="warning", ranks=ranks, evidence=evidence)


def test_a_finding_about_layers_is_shown_in_one_cell() -> None:
    """Twice in the cell where it is first, in no later one; other layers and other codes are new each time."""
    repeated = Repeated()
    norm, other, wait = find("DDP408", "layers: bn"), find("DDP408", "layers: bn2"), find("DDP217", "slow")
    assert repeated.without([norm, wait]) == repeated.without([norm, wait]) == [norm, wait]
    repeated.begin()
    assert repeated.without([norm, other, wait]) == [other, wait]
    repeated.begin()
    assert repeated.without([norm, other, wait]) == [wait]


def test_the_same_layers_on_one_rank_alone_are_not_new() -> None:
    """As in a cell in which the other rank fails before its first batch."""
    repeated = Repeated()
    repeated.without([find("DDP408", "layers: bn")])
    repeated.begin()
    assert repeated.without([find("DDP408", "layers: bn", ranks=(0,))]) == []
