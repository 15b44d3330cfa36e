# SPDX-License-Identifier: Apache-2.0
"""Render reports as text, JSON, SARIF 2.1.0 or commands of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ddpilot.findings.catalog import find_entry, make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.order import sort_findings
from ddpilot.lint.linter import Diagnostic
from ddpilot.user_files import CodeLine

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def render_text(found: Sequence[Diagnostic]) -> str:
    """Return one line for each report: ``path:line:column CODE message``."""
    return "\n".join(f"{each.place} {each.code} {each.message}" for each in found)


def render_json(found: Sequence[Diagnostic]) -> str:
    """Return a JSON array of findings, errors first, each with the fields of `Finding` and what only lint knows."""
    by_finding: dict[Finding, list[Diagnostic]] = {}
    for each in found:
        by_finding.setdefault(_as_finding(each), []).append(each)
    rows = [
        {**finding.to_dict(), "cell": each.cell or None, "column": each.column, "fixable": each.edit is not None}
        for finding in sort_findings(by_finding)
        for each in by_finding[replace(finding, explained_by="")]
    ]
    return json.dumps(rows, indent=2)


def _as_finding(found: Diagnostic) -> Finding:
    return make_finding(found.code, summary=found.message, line=CodeLine(file=found.path, line=found.line))


def render_sarif(found: Sequence[Diagnostic]) -> str:
    """Return a SARIF log with the pages of the codes that occur as its rules."""
    entries = [find_entry(code) for code in sorted({each.code for each in found})]
    rules = [
        {
            "id": entry.code,
            "name": entry.name,
            "shortDescription": {"text": entry.title},
            "help": {"text": entry.text},
            "defaultConfiguration": {"level": _LEVELS[entry.severity]},
        }
        for entry in entries
    ]
    results = [
        {
            "ruleId": each.code,
            "level": _LEVELS[find_entry(each.code).severity],
            "message": {"text": f"cell {each.cell}: {each.message}" if each.cell else each.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": each.path.replace("\\", "/")},
                        "region": {"startLine": each.line, "startColumn": each.column},
                    }
                }
            ],
        }
        for each in found
    ]
    run = {"tool": {"driver": {"name": "ddpilot lint", "rules": rules}}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def render_github(found: Sequence[Diagnostic]) -> str:
    """Return one command for each report, which GitHub shows at its line of a pull request."""
    kinds = {"error": "error", "warning": "warning", "info": "notice"}
    return "\n".join(
        f"::{kinds[find_entry(each.code).severity]} file={each.path},line={each.line},col={each.column},"
        f"title={each.code}::{f'cell {each.cell}: ' if each.cell else ''}{each.message.replace('%', '%25')}"
        for each in found
    )


FORMATS: Mapping[str, Callable[[Sequence[Diagnostic]], str]] = {
    "text": render_text,
    "json": render_json,
    "sarif": render_sarif,
    "github": render_github,
}
