# SPDX-License-Identifier: Apache-2.0
"""Findings as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding

FORMAT = 1


def render_json(findings: Iterable[Finding]) -> str:
    """``{"format": 1, "findings": [...]}``, indented, readable with `parse_json`."""
    document = {"format": FORMAT, "findings": [finding.to_dict() for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def parse_json(text: str) -> tuple[Finding, ...]:
    """The findings that `render_json` wrote. Raises `DdpilotError` for anything else."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise _refuse(f"format {document['format']!r} instead of {FORMAT}")
        return tuple(Finding.from_dict(values) for values in document["findings"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refuse(f"{type(error).__name__}: {error}") from error


def _refuse(found: str) -> DdpilotError:
    return DdpilotError("reading findings from JSON", found=found, fix="Give the text that `render_json` wrote")
