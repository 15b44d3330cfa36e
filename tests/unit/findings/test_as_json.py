# SPDX-License-Identifier: Apache-2.0
"""JSON that other programs read, and that is read back."""

from __future__ import annotations

import json

import pytest

from ddpilot.errors import DdpilotError
from ddpilot.findings.as_json import parse_json, render_json
from tests.unit.findings.samples import DESYNC, HOSTILE, SMALL_BATCH


def test_render_json_is_read_back_as_it_was() -> None:
    """All findings, in their order, with every field."""
    findings = (DESYNC, SMALL_BATCH, HOSTILE)
    assert parse_json(render_json(findings)) == findings
    assert parse_json(render_json([])) == ()


def test_render_json_has_the_documented_shape() -> None:
    """A format number and plain values under the names of the fields."""
    document = json.loads(render_json([SMALL_BATCH]))
    assert document["format"] == 1
    (values,) = document["findings"]
    assert values["ranks"] == [0, 1, 2, 3]
    assert values["place"]["line"] == 12
    assert values["place"]["function"] == "Net.__init__"
    assert values["evidence"] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 2, "findings": []}', "format 2 instead of 1"),
        ('{"format": 1, "findings": [7]}', "AttributeError"),
    ],
)
def test_parse_json_refuses_what_it_did_not_write(text: str, found: str) -> None:
    """The error says what was found instead."""
    with pytest.raises(DdpilotError) as caught:
        parse_json(text)
    assert found in caught.value.found
