# SPDX-License-Identifier: Apache-2.0
"""`Findings`: a sequence of findings that renders itself in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any, overload

from ddpilot.findings.finding import Finding, Severity
from ddpilot.findings.text import printable, render_ranks


@dataclass(frozen=True, init=False, repr=False)
class Findings(Sequence[Finding]):
    """An immutable sequence of findings in the order given; a slice is a `Findings` too."""

    items: tuple[Finding, ...]

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        object.__setattr__(self, "items", tuple(findings))

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Findings: ...

    def __getitem__(self, index: int | slice) -> Finding | Findings:
        return Findings(self.items[index]) if isinstance(index, slice) else self.items[index]

    def __str__(self) -> str:
        return render_text(self.items)

    def __repr__(self) -> str:
        return f"Findings({', '.join(finding.code for finding in self.items)})"

    def _repr_html_(self) -> str:
        return render_html(self.items)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))


_MIN_WIDTH = 40
_ANSI_COLORS: dict[Severity, str] = {"error": "31", "warning": "33", "info": "36"}


def render_text(findings: Iterable[Finding], width: int | None = None, color: bool = False) -> str:
    """Return one block per finding, separated by empty lines; ``no findings`` if there are none.

    `width`: column at which to wrap, at least 40; None (the default) never wraps. `color`: use ANSI colors. Control
    characters in a finding are shown as escapes.
    """
    blocks = [_text_block(finding, None if width is None else max(width, _MIN_WIDTH), color) for finding in findings]
    return "\n\n".join(blocks) if blocks else "no findings"


def _text_block(finding: Finding, width: int | None, color: bool) -> str:
    label = "" if finding.severity == "error" else f"{finding.severity}: "
    name = _paint(finding.name, f"1;{_ANSI_COLORS[finding.severity]}", color)
    # Wrap without the color codes, which take no space on the screen.
    head = _fold(f"{finding.name}  {finding.code}  {label}{finding.summary}".rstrip(), "", width)
    head[0] = head[0].replace(finding.name, name, 1)
    where = "  ".join(filter(None, _where(finding)))
    lines = head + (_fold(where, "  ", width) if where else [])
    for line in finding.evidence:
        lines += _fold(line, "  ", width)
    for label, text in (("why: ", finding.why), ("fix: ", finding.fix), ("see: ", finding.source)):
        if text:
            folded = _fold(label + text, "  ", width)
            lines += [folded[0].replace(label, _paint(label, "1", color), 1), *folded[1:]]
    return "\n".join(lines)


def _where(finding: Finding) -> tuple[str, str]:
    """Return ranks and place as text; empty if there are none, or if summary or evidence already show them."""
    names_ranks = finding.ranks and not (finding.shows_place or finding.says_ranks)
    place = str(finding.place) if finding.place and not finding.shows_place else ""
    return render_ranks(finding.ranks) if names_ranks else "", place


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


# Text inherits the notebook's color and nothing sets a background, so that light and dark themes both stay readable.
# These three colors have enough contrast on white and on black for a line and a bold word.
_HTML_COLORS: dict[Severity, str] = {"error": "#d33", "warning": "#b87503", "info": "#2b8a9e"}
_BLOCK_STYLE = "border-left:4px solid {color};padding:2px 0 2px 10px;margin:0 0 12px 0;color:inherit;line-height:1.4"
_PRE_STYLE = (
    "margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;background:transparent;color:inherit;font-size:0.95em"
)


def render_html(findings: Iterable[Finding]) -> str:
    """Return all findings as one ``<div>`` without scripts, style sheets or external resources; all text is escaped."""
    blocks = "".join(_html_block(finding) for finding in findings)
    return f'<div class="ddpilot-findings">{blocks or "<p>no findings</p>"}</div>'


def _html_block(finding: Finding) -> str:
    color = _HTML_COLORS[finding.severity]
    name = f'<b style="color:{color}">{_escaped(finding.name)}</b> <code>{_escaped(finding.code)}</code>'
    parts = [f"<div>{name} <i>{finding.severity}</i> {_escaped(finding.summary)}</div>"]
    ranks, place = map(_escaped, _where(finding))
    if ranks or place:
        parts.append(f"<div>{' &nbsp; '.join(filter(None, (ranks, place and f'<code>{place}</code>')))}</div>")
    if finding.evidence:
        lines = "\n".join(_escaped(line) for line in finding.evidence)
        parts.append(f'<pre style="{_PRE_STYLE}">{lines}</pre>')
    for label, text in (
        ("why", _escaped(finding.why)),
        ("fix", _escaped(finding.fix)),
        ("see", _source_link(finding.source)),
    ):
        if text:
            parts.append(f'<div style="white-space:pre-wrap"><b>{label}:</b> {text}</div>')
    return f'<div style="{_BLOCK_STYLE.format(color=color)}">{"".join(parts)}</div>'


def _escaped(text: str) -> str:
    return escape(printable(text))


def _source_link(source: str) -> str:
    if source.startswith(("https://", "http://")) and not any(c.isspace() for c in source):
        return f'<a href="{_escaped(source)}" rel="noopener noreferrer">{_escaped(source)}</a>'
    return _escaped(source)
