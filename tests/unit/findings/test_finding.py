# SPDX-License-Identifier: Apache-2.0
"""A finding is checked, frozen, and equal after a round trip."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding
from ddpilot.user_files import CodeLine

TEXT = st.text(max_size=12)
PLACES = st.builds(CodeLine, file=TEXT, line=st.integers(1, 10**6), function=TEXT, text=TEXT)
FINDINGS = st.builds(
    Finding,
    code=st.text(min_size=1, max_size=8),
    name=st.text(min_size=1, max_size=8),
    severity=st.sampled_from(["error", "warning", "info"]),
    summary=TEXT,
    ranks=st.lists(st.integers(0, 4095), max_size=5).map(tuple),
    place=st.none() | PLACES,
    evidence=st.lists(TEXT, max_size=3).map(tuple),
    why=TEXT,
    fix=TEXT,
    source=TEXT,
)


@settings(derandomize=True, deadline=None, database=None, max_examples=50)
@given(FINDINGS)
def test_finding_survives_json(finding: Finding) -> None:
    """For any texts, the finding that is read back equals the one that was written."""
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"code": ""}, "code=''"),
        ({"name": ""}, "name=''"),
        ({"severity": "fatal"}, "severity='fatal'"),
        ({"ranks": (0, -1)}, "ranks=(0, -1)"),
    ],
)
def test_finding_refuses_what_it_cannot_mean(change: dict[str, Any], found: str) -> None:
    """The error contains the value."""
    valid = {"code": "DDP201", "name": "desync", "severity": "error"}
    with pytest.raises(DdpilotError) as caught:
        Finding(**(valid | change))
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"code": "DDP201", "name": "desync"}, "severity"),
        ({"code": "DDP201", "name": "desync", "severity": "error", "colour": "red"}, "unknown fields colour"),
        ({"code": "DDP201", "name": "desync", "severity": "error", "place": {"file": "a.py"}}, "line"),
    ],
)
def test_finding_from_dict_names_the_field_that_is_missing_or_unknown(values: dict[str, Any], found: str) -> None:
    """A file of a different version is refused, not partly read."""
    with pytest.raises(DdpilotError) as caught:
        Finding.from_dict(values)
    assert found in caught.value.found


def test_finding_is_frozen_and_hashable() -> None:
    """Findings are compared and hashed, and cannot be changed."""
    finding = Finding(code="DDP201", name="desync", severity="error", ranks=(1,), place=CodeLine(file="a.py", line=3))
    assert len({finding, Finding.from_dict(finding.to_dict())}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.ranks = ()  # type: ignore[misc]


def test_place_is_one_line() -> None:
    """File and line as editors open them, then the source text where it is known."""
    assert str(CodeLine(file="train.py", line=91, text="dist.barrier()")) == "train.py:91  dist.barrier()"
    assert str(CodeLine(file="train.py", line=91)) == "train.py:91"
