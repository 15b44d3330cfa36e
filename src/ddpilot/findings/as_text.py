# SPDX-License-Identifier: Apache-2.0
"""Render findings as text for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from ddpilot.findings.finding import Finding, Severity
from ddpilot.findings.text import printable, render_ranks

_MIN_WIDTH = 40
_COLORS: dict[Severity, str] = {"error": "31", "warning": "33", "info": "36"}


def render_text(findings: Iterable[Finding], width: int | None = None, color: bool = False) -> str:
    """Return one block per finding, separated by empty lines; ``no findings`` if there are none.

    `width`: column at which to wrap, at least 40; None (the default) never wraps. `color`: use ANSI colors. Control
    characters in a finding are shown as escapes.
    """
    blocks = [_render_block(finding, None if width is None else max(width, _MIN_WIDTH), color) for finding in findings]
    return "\n\n".join(blocks) if blocks else "no findings"


def _render_block(finding: Finding, width: int | None, color: bool) -> str:
    label = "" if finding.severity == "error" else f"{finding.severity}: "
    name = _paint(finding.name, f"1;{_COLORS[finding.severity]}", color)
    # Wrap without the color codes, which take no space on the screen.
    head = _fold(f"{finding.name}  {finding.code}  {label}{finding.summary}".rstrip(), "", width)
    head[0] = head[0].replace(finding.name, name, 1)
    names_ranks = bool(finding.ranks) and not (finding.shows_place or finding.says_ranks)
    where = [render_ranks(finding.ranks)] if names_ranks else []
    where += [str(finding.place)] if finding.place and not finding.shows_place else []
    lines = head + (_fold("  ".join(where), "  ", width) if where else [])
    for line in finding.evidence:
        lines += _fold(line, "  ", width)
    for label, text in (("why: ", finding.why), ("fix: ", finding.fix), ("see: ", finding.source)):
        if text:
            folded = _fold(label + text, "  ", width)
            lines += [folded[0].replace(label, _paint(label, "1", color), 1), *folded[1:]]
    return "\n".join(lines)


def _fold(text: str, indent: str, width: int | None) -> list[str]:
    """Split `text` into lines indented by `indent`; continuation lines are indented by four more columns."""
    lines: list[str] = []
    for line in printable(text).split("\n"):
        more = indent if not lines else indent + "    "
        if width is None or len(more) + len(line) <= width:
            lines.append(f"{more}{line}".rstrip())
        else:
            lines += wrap(
                line,
                width,
                initial_indent=more,
                subsequent_indent=indent + "    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def _paint(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color else text
