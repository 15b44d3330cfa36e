# SPDX-License-Identifier: Apache-2.0
"""Requests to a rank, and its reports, as JSON in Jupyter messages."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ddpilot.launching.rank_reports import Raised
from ddpilot.session.protocol.messages import (
    REPORT_KEY,
    Call,
    CellRequest,
    Compare,
    Finish,
    Pull,
    Push,
    Rebuild,
    Report,
    Request,
    Scope,
    read_request,
    request_content,
)


@pytest.mark.parametrize(
    "request_sent",
    [
        Call(),
        Push(),
        Pull(expressions=["x", "y + 1"]),
        Rebuild(generation=2, enter=True, backend=None),
        Compare(),
        Finish(),
    ],
    ids=lambda request: type(request).__name__,
)
def test_requests_survive_json(request_sent: Request) -> None:
    """With their scope."""
    scope = Scope(ranks=(0, 2), blocked="rank 1 is dead")
    content = json.loads(json.dumps(request_content(request_sent, scope)))
    assert read_request(content) == (request_sent, scope)


def test_a_cell_survives_json() -> None:
    """Ranks are a tuple again."""
    cell = CellRequest(number=7, keep_cache=False, scope=Scope(ranks=(1,)))
    assert CellRequest.from_content(json.loads(json.dumps(asdict(cell)))) == cell


def test_each_request_has_a_token_of_its_own() -> None:
    """A rank closes connections of interrupted requests by it."""
    assert Call().token != Call().token


def test_report_survives_json() -> None:
    """Every field is restored; lone surrogates, which UTF-8 cannot encode, are escaped."""
    raised = Raised(
        time_s=1.5,
        type_name="ValueError",
        message="\u00e9\ud800",
        traceback="",
        is_victim=False,
        interrupted=True,
        exitcode=1,
    )
    report = Report(raised=raised, has_group=True, num_collectives=3, group_counts={"0 0-1": 2}, value={"a": [1]})
    content = json.loads(json.dumps({REPORT_KEY: report.to_content()}).encode())
    found = Report.from_content(content)
    assert found is not None
    assert found.error == ("ValueError", "\u00e9\\ud800", "")
    assert Report.from_content({REPORT_KEY: found.to_content()}) == found
    assert (found.has_group, found.num_collectives, found.value) == (True, 3, {"a": [1]})


def test_report_is_none_if_the_reply_has_none() -> None:
    """As for an aborted request."""
    assert Report.from_content({"status": "aborted"}) is None
