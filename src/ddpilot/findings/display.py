# SPDX-License-Identifier: Apache-2.0
"""`Findings`: sorted and grouped findings as text, HTML or JSON, at most one screen unless all are asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import Any, overload

from ddpilot.findings.finding import Finding, Severity
from ddpilot.findings.order import Group, group_findings, sort_findings
from ddpilot.findings.text import printable, render_ranks


@dataclass(frozen=True, init=False, repr=False)
class Findings(Sequence[Finding]):
    """An immutable sequence of findings in the order of `sort_findings`; a slice is a `Findings` too.

    As a string, and in a notebook, it takes at most one screen. `more`: where the rest is shown, such as a command in
    backticks. `is_ranked`: as of `group_findings`.
    """

    items: tuple[Finding, ...]
    more: str = field(compare=False)
    is_ranked: bool = field(compare=False)

    def __init__(self, findings: Iterable[Finding] = (), *, more: str = "", is_ranked: bool = False) -> None:
        object.__setattr__(self, "items", sort_findings(findings, is_ranked=is_ranked))
        object.__setattr__(self, "more", more)
        object.__setattr__(self, "is_ranked", is_ranked)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Findings: ...

    def __getitem__(self, index: int | slice) -> Finding | Findings:
        if isinstance(index, slice):
            return Findings(self.items[index], more=self.more, is_ranked=self.is_ranked)
        return self.items[index]

    def to_list(self) -> list[dict[str, Any]]:
        """Return all findings as JSON-serializable values."""
        return [finding.to_dict() for finding in self.items]

    def render(self, width: int | None = None, color: bool = False, *, height: int | None = None) -> str:
        """Return the text of `render_text`; empty if there are no findings."""
        if not self.items:
            return ""
        return render_text(self.items, width, color, height=height, more=self.more, is_ranked=self.is_ranked)

    def __str__(self) -> str:
        return self.render(height=screen_size().lines) or render_text(())

    def __repr__(self) -> str:
        return f"Findings({', '.join(finding.code for finding in self.items)})"

    def _repr_html_(self) -> str:
        return render_html(self.items, is_ranked=self.is_ranked)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))


_MIN_WIDTH = 40
_MAX_BRIEF = 5
"""Further places of a group, and lines of its evidence, where not everything fits on the screen."""
_ANSI_COLORS: dict[Severity, str] = {"error": "31", "warning": "33", "info": "36"}


def screen_size() -> os.terminal_size:
    """Return the columns of the terminal, and its lines without two for the prompt; 120 and 38 without a terminal."""
    columns, lines = shutil.get_terminal_size((120, 40))
    return os.terminal_size((columns, lines - 2))


def render_text(
    findings: Iterable[Finding],
    width: int | None = None,
    color: bool = False,
    *,
    height: int | None = None,
    more: str = "",
    is_ranked: bool = False,
) -> str:
    """Return one block per code and fix, separated by empty lines; ``no findings`` if there are none.

    `width`: column at which to wrap, at least 40; None (the default) never wraps. `color`: use ANSI colors. `height`:
    lines of the screen that the text may take; None (the default): as many as it needs. What does not fit is shortened,
    then left out from the end, and the last line names `more`, where the rest is shown. `is_ranked`: as of
    `group_findings`. Control characters in a finding are shown as escapes.
    """
    groups = group_findings(findings, is_ranked=is_ranked)
    if not groups:
        return "no findings"
    layout = _Layout(width=None if width is None else max(width, _MIN_WIDTH), color=color)
    blocks = [layout.block(group) for group in groups]
    if height is None or _num_rows(blocks, width) <= height:
        return _join(blocks)
    brief = [_Layout(width=layout.width, color=color, is_brief=True).block(group) for group in groups]
    return _join(_fit(brief, [len(tuple(group)) for group in groups], width, height, more))


def _fit(blocks: list[list[str]], counts: Sequence[int], width: int | None, height: int, more: str) -> list[list[str]]:
    """Keep the first blocks that fit, with a last line about the others; always a part of the first."""
    kept = list(blocks)
    while len(kept) > 1 and _num_rows([*kept, [""]], width) > height:
        kept.pop()
    first = kept[0]
    while len(first) > 1 and _num_rows([*kept, [""]], width) > height:
        first.pop()
    num = sum(counts[len(kept) :])
    left = f"and {num} more" if num else "in full"
    return [*kept, [f"... {left}{f': {more}' if more else ''}"]]


def _num_rows(blocks: Sequence[Sequence[str]], width: int | None) -> int:
    """Return how many rows of the screen the blocks take, with the empty lines between them."""
    columns = width or screen_size().columns
    return sum(max(1, -(-len(line) // columns)) for block in blocks for line in block) + len(blocks) - 1


def _join(blocks: Iterable[Iterable[str]]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How groups become lines."""

    width: int | None
    color: bool
    is_brief: bool = False

    def block(self, group: Group, indent: str = "", lead: str = "") -> list[str]:
        """Return the lines of a group: its first finding, the further places, why and fix, what it explains."""
        first, *others = dict.fromkeys(group.members)
        inner = indent + "  "
        lines = self._head(first, indent, lead) + self._folded(_where_text(first), inner)
        for line in first.evidence[: _MAX_BRIEF if self.is_brief else None]:
            lines += self._folded(line, inner)
        for other in others[: _MAX_BRIEF if self.is_brief else None]:
            lines += self._other(other, first, inner)
        num_left = len(others) - _MAX_BRIEF if self.is_brief else 0
        lines += [f"{inner}also: {num_left} more places"] if num_left > 0 else []
        for label, text in (("why: ", first.why), ("fix: ", first.fix), ("see: ", first.source)):
            lines += self._labelled(label, text, inner)
        for below in group.consequences:
            lines += self._consequence(below, inner)
        return lines

    def _head(self, finding: Finding, indent: str, lead: str) -> list[str]:
        label = "" if finding.severity == "error" else f"{finding.severity}: "
        name = _paint(finding.name, f"1;{_ANSI_COLORS[finding.severity]}", self.color)
        # Wrap without the color codes, which take no space on the screen.
        head = self._folded(f"{lead}{finding.name}  {finding.code}  {label}{finding.summary}".rstrip(), indent)
        return [head[0].replace(finding.name, name, 1), *head[1:]]

    def _other(self, finding: Finding, first: Finding, indent: str) -> list[str]:
        """Return the lines of a further finding of a group, without what it has in common with the first."""
        summary = finding.summary if finding.summary != first.summary else ""
        lines = self._labelled("also: ", "  ".join(filter(None, (summary, _where_text(finding)))) or "again", indent)
        if self.is_brief:
            return lines
        if finding.evidence != first.evidence:
            for line in finding.evidence:
                lines += self._folded(line, indent + "  ")
        return lines + (self._labelled("why: ", finding.why, indent + "  ") if finding.why != first.why else [])

    def _consequence(self, group: Group, indent: str) -> list[str]:
        if not self.is_brief:
            return self.block(group, indent, "so: ")
        return [line for finding in group.members for line in self._head(finding, indent, "so: ")[:1]]

    def _labelled(self, label: str, text: str, indent: str) -> list[str]:
        if not text:
            return []
        folded = self._folded(label + text, indent)
        return [folded[0].replace(label, _paint(label, "1", self.color), 1), *folded[1:]]

    def _folded(self, text: str, indent: str) -> list[str]:
        """Split `text` into lines indented by `indent`; continuation lines are indented by four more columns."""
        lines: list[str] = []
        for line in printable(text).split("\n") if text else ():
            more = indent if not lines else indent + "    "
            if self.width is None or len(more) + len(line) <= self.width:
                lines.append(f"{more}{line}".rstrip())
            else:
                lines += wrap(
                    line,
                    self.width,
                    initial_indent=more,
                    subsequent_indent=indent + "    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        return lines


def _where(finding: Finding) -> tuple[str, str]:
    """Return ranks and place as text; empty if there are none, or if summary or evidence already show them."""
    names_ranks = finding.ranks and not (finding.shows_place or finding.says_ranks)
    place = str(finding.place) if finding.place and not finding.shows_place else ""
    return render_ranks(finding.ranks) if names_ranks else "", place


def _where_text(finding: Finding) -> str:
    return "  ".join(filter(None, _where(finding)))


def _paint(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color else text


# Text inherits the notebook's color and nothing sets a background, so that light and dark themes both stay readable.
# These three colors have enough contrast on white and on black for a line and a bold word.
_HTML_COLORS: dict[Severity, str] = {"error": "#d33", "warning": "#b87503", "info": "#2b8a9e"}
_BLOCK_STYLE = "border-left:4px solid {color};padding:2px 0 2px 10px;margin:0 0 12px 0;color:inherit;line-height:1.4"
_PRE_STYLE = (
    "margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;background:transparent;color:inherit;font-size:0.95em"
)
_HTML_SCREEN = os.terminal_size((120, 38))


def render_html(findings: Iterable[Finding], *, is_ranked: bool = False) -> str:
    """Return all findings as one ``<div>`` without scripts, style sheets or external resources; all text is escaped.

    The order and the groups are those of `render_text`; what takes more than one screen is folded.
    """
    groups = group_findings(findings, is_ranked=is_ranked)
    layout, num = _Layout(width=_HTML_SCREEN.columns, color=False), len(groups)
    while num > 1 and _num_rows([layout.block(each) for each in groups[:num]], None) > _HTML_SCREEN.lines:
        num -= 1
    blocks = "".join(map(_html_block, groups[:num])) or "<p>no findings</p>"
    folded = _fold_html([_html_block(each) for each in groups[num:]], sum(len(tuple(each)) for each in groups[num:]))
    return f'<div class="ddpilot-findings">{blocks}{folded}</div>'


def _html_block(group: Group) -> str:
    first, *others = dict.fromkeys(group.members)
    color = _HTML_COLORS[first.severity]
    parts = [_html_head(first), _html_where(first), _html_evidence(first)]
    also = [_html_other(each, first) for each in others]
    parts += [*also[:_MAX_BRIEF], _fold_html(also[_MAX_BRIEF:], len(also[_MAX_BRIEF:]))]
    parts += [
        _html_labelled("why", _escaped(first.why)),
        _html_labelled("fix", _escaped(first.fix)),
        _html_labelled("see", _source_link(first.source)),
        *(f"<div><b>so:</b></div>{_html_block(below)}" for below in group.consequences),
    ]
    return f'<div style="{_BLOCK_STYLE.format(color=color)}">{"".join(parts)}</div>'


def _html_head(finding: Finding) -> str:
    color = _HTML_COLORS[finding.severity]
    name = f'<b style="color:{color}">{_escaped(finding.name)}</b> <code>{_escaped(finding.code)}</code>'
    return f"<div>{name} <i>{finding.severity}</i> {_escaped(finding.summary)}</div>"


def _html_where(finding: Finding, lead: str = "") -> str:
    ranks, place = map(_escaped, _where(finding))
    shown = " &nbsp; ".join(filter(None, (lead, ranks, place and f"<code>{place}</code>")))
    return f"<div>{shown}</div>" if shown else ""


def _html_evidence(finding: Finding) -> str:
    lines = "\n".join(_escaped(line) for line in finding.evidence)
    return f'<pre style="{_PRE_STYLE}">{lines}</pre>' if lines else ""


def _html_other(finding: Finding, first: Finding) -> str:
    summary = _escaped(finding.summary) if finding.summary != first.summary else ""
    evidence = _html_evidence(finding) if finding.evidence != first.evidence else ""
    why = _html_labelled("why", _escaped(finding.why)) if finding.why != first.why else ""
    return _html_where(finding, f"<b>also:</b> {summary}".strip()) + evidence + why


def _html_labelled(label: str, text: str) -> str:
    return f'<div style="white-space:pre-wrap"><b>{label}:</b> {text}</div>' if text else ""


def _fold_html(parts: Sequence[str], num: int) -> str:
    return f"<details><summary>and {num} more</summary>{''.join(parts)}</details>" if parts else ""


def _escaped(text: str) -> str:
    return escape(printable(text))


def _source_link(source: str) -> str:
    if source.startswith(("https://", "http://")) and not any(c.isspace() for c in source):
        return f'<a href="{_escaped(source)}" rel="noopener noreferrer">{_escaped(source)}</a>'
    return _escaped(source)
