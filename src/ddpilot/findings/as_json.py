# SPDX-License-Identifier: Apache-2.0
"""Write findings as JSON and read them back."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ddpilot.errors import DdpilotError
from ddpilot.findings.finding import Finding

FORMAT = 1


def render_json(findings: Iterable[Finding]) -> str:
    """Return ``{"format": 1, "findings": [...]}`` as indented text, which `parse_json` reads."""
    document = {"format": FORMAT, "findings": [finding.to_dict() for finding in findings]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def parse_json(text: str) -> tuple[Finding, ...]:
    """Return the findings that `render_json` wrote. Raises `DdpilotError` for any other text."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise _refuse(f"format {document['format']!r} instead of {FORMAT}")
        return tuple(Finding.from_dict(values) for values in document["findings"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refuse(f"{type(error).__name__}: {error}") from error


def _refuse(found: str) -> DdpilotError:
    return DdpilotError("reading findings from JSON", found=found, fix="Give the text that `render_json` wrote")
