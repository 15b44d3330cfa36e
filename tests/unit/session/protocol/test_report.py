# SPDX-License-Identifier: Apache-2.0
"""A report of a rank as JSON in a Jupyter reply."""

from __future__ import annotations

import json

from ddpilot.launching.rank_reports import Raised
from ddpilot.session.protocol.messages import REPORT_KEY, Report


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
