# SPDX-License-Identifier: Apache-2.0
"""A report of a rank travels inside a Jupyter reply as JSON."""

from __future__ import annotations

import json

from ddpilot.session.protocol.report import REPORT_KEY, Report


def test_report_survives_json() -> None:
    """Every field comes back; a reply without one has none."""
    report = Report(status="error", time_s=1.5, has_group=True, num_collectives=3, type_name="ValueError", message="é")
    content = json.loads(json.dumps({REPORT_KEY: report.to_content()}))
    assert Report.from_content(content) == report
    assert Report.from_content({"status": "aborted"}) is None
