# SPDX-License-Identifier: Apache-2.0
"""``ddpilot lint``: report the faults of scripts and notebooks in four formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.errors import DdpilotError
from ddpilot.findings.catalog import find_entry, make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.order import sort_findings
from ddpilot.lint.fixes import fix_text, render_diff
from ddpilot.lint.linter import SUFFIXES, Diagnostic, LintOptions, find_files, lint_files, read_options
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


def lint(
    paths: Sequence[str],
    *,
    select: str = "",
    ignore: str = "",
    output_format: str = "text",
    fix: bool = False,
    diff: bool = False,
) -> int:
    """Print the reports for `paths`; return 2 if a file of `paths` cannot be parsed, else 1 if there are any, else 0.

    A file in a folder that cannot be parsed does not change the status. If there is nothing to report, the text format
    prints the number of files to stderr.

    `fix`: print the changes as a diff, make them, and report what is left. `diff`: print the changes only; return 1 if
    there are any.

    `select`, `ignore`: codes with commas between; they replace those of pyproject.toml. Raises `DdpilotError` for an
    unknown code, format or path.
    """
    if output_format not in FORMATS:
        raise DdpilotError("linting", found=f"--format {output_format}", fix=f"Use one of {', '.join(FORMATS)}")
    options = read_options(Path.cwd())
    if select:
        options = replace(options, select=_codes(select))
    if ignore:
        options = replace(options, ignore=_codes(ignore))
    files = list(find_files(paths, options.exclude))
    if fix or diff:
        changed = [each for each in files if _fix(each, options, writes=fix and not diff)]
        if diff:
            return 1 if changed else 0
    unreadable: list[str] = []

    def report_unreadable(path: str, reason: str) -> None:
        unreadable.append(path)
        print(f"{path}: not checked: {reason}", file=sys.stderr)

    found = list(lint_files(files, options, report_unreadable, named=paths))
    if found or output_format in ("json", "sarif"):
        print(FORMATS[output_format](found))
    elif output_format == "text" and not unreadable:
        checked = f"{len(files)} file{'s' * (len(files) != 1)} checked, nothing to report"
        print(checked if files else "no Python file or notebook found", file=sys.stderr)
    return 2 if set(unreadable) & set(paths) else 1 if found else 0


def _fix(path: str, options: LintOptions, *, writes: bool) -> bool:
    """Print the changes of one file as a diff, and make them if `writes`; return True if there are any."""
    if not path.endswith(SUFFIXES):
        return False
    try:
        before = Path(path).read_bytes().decode()
        after = fix_text(before, path, options)
    except (SyntaxError, ValueError, RecursionError, OSError):
        return False  # reported by the check
    print(render_diff(before, after, path), end="")
    if writes and after != before:
        Path(path).write_bytes(after.encode())
    return after != before


def _codes(text: str) -> tuple[str, ...]:
    return tuple(each.strip().upper() for each in text.split(",") if each.strip())
