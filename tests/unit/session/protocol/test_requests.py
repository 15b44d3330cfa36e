# SPDX-License-Identifier: Apache-2.0
"""Requests to a rank as JSON in Jupyter messages."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ddpilot.session.protocol.messages import (
    Call,
    CellRequest,
    Compare,
    Finish,
    Pull,
    Push,
    Rebuild,
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
