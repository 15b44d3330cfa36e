# SPDX-License-Identifier: Apache-2.0
"""Render findings as an HTML fragment for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ddpilot.findings.finding import Finding, Severity
from ddpilot.findings.text import printable, render_ranks

# Text inherits the notebook's color and nothing sets a background, so that light and dark themes both stay readable.
# These three colors have enough contrast on white and on black for a line and a bold word.
_COLORS: dict[Severity, str] = {"error": "#d33", "warning": "#b87503", "info": "#2b8a9e"}
_BLOCK = "border-left:4px solid {color};padding:2px 0 2px 10px;margin:0 0 12px 0;color:inherit;line-height:1.4"
_PRE = "margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;background:transparent;color:inherit;font-size:0.95em"


def render_html(findings: Iterable[Finding]) -> str:
    """Return all findings as one ``<div>`` without scripts, style sheets or external resources; all text is escaped."""
    blocks = "".join(_render_block(finding) for finding in findings)
    return f'<div class="ddpilot-findings">{blocks or "<p>no findings</p>"}</div>'


def _render_block(finding: Finding) -> str:
    color = _COLORS[finding.severity]
    name = f'<b style="color:{color}">{_text(finding.name)}</b> <code>{_text(finding.code)}</code>'
    parts = [f"<div>{name} <i>{finding.severity}</i> {_text(finding.summary)}</div>"]
    names_ranks = bool(finding.ranks) and not (finding.shows_place or finding.says_ranks)
    where = [_text(render_ranks(finding.ranks))] if names_ranks else []
    where += [f"<code>{_text(str(finding.place))}</code>"] if finding.place and not finding.shows_place else []
    if where:
        parts.append(f"<div>{' &nbsp; '.join(where)}</div>")
    if finding.evidence:
        lines = "\n".join(_text(line) for line in finding.evidence)
        parts.append(f'<pre style="{_PRE}">{lines}</pre>')
    for label, text in (("why", _text(finding.why)), ("fix", _text(finding.fix)), ("see", _source(finding.source))):
        if text:
            parts.append(f'<div style="white-space:pre-wrap"><b>{label}:</b> {text}</div>')
    return f'<div style="{_BLOCK.format(color=color)}">{"".join(parts)}</div>'


def _text(text: str) -> str:
    return escape(printable(text))


def _source(source: str) -> str:
    if source.startswith(("https://", "http://")) and not any(c.isspace() for c in source):
        return f'<a href="{_text(source)}" rel="noopener noreferrer">{_text(source)}</a>'
    return _text(source)
