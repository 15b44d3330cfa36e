# SPDX-License-Identifier: Apache-2.0
"""Read the report that a rank wrote about its exception."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ddpilot.launching.elastic.rank_main import REPORT_KEY
from ddpilot.launching.rank_reports import Raised


def read_report(path: Path) -> Raised | None:
    """The exception that a rank reported in `path`; None if there is no report, or only one of torch's `record`."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))[REPORT_KEY]
    except (OSError, ValueError, KeyError):
        return None
    return Raised(**{field.name: said[field.name] for field in fields(Raised)})
