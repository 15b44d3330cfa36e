# SPDX-License-Identifier: Apache-2.0
"""`Explanation`: what `prepare` chose, why, what it costs, and what would be better; as text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from ddpilot.findings.as_html import render_html
from ddpilot.findings.as_text import render_text
from ddpilot.findings.finding import Finding
from ddpilot.findings.sequence import Findings
from ddpilot.training.ddp_options import Choice


@dataclass(frozen=True)
class Explained:
    """One model or optimizer that `prepare` returned."""

    title: str
    """Its class, and what was made of it."""
    choices: tuple[Choice, ...] = ()
    """Every option, with its reason; empty where nothing was wrapped."""
    measured: tuple[str, ...] = ()
    """What was seen so far, line by line."""
    proposals: tuple[Finding, ...] = ()
    """What would be better, by what was seen so far; nothing of it is done by itself."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a loop prepared, in the order in which it did. Its text is for a terminal; a notebook shows a table."""

    parts: tuple[Explained, ...]

    @property
    def proposals(self) -> Findings:
        """Those of all parts."""
        return Findings(proposal for part in self.parts for proposal in part.proposals)

    def __str__(self) -> str:
        return "\n\n".join(_render(part) for part in self.parts) or "nothing is prepared yet"

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def _repr_html_(self) -> str:
        parts = "".join(_render_html(part) for part in self.parts)
        return f'<div class="ddpilot-explanation">{parts or "<p>nothing is prepared yet</p>"}</div>'


def _render(part: Explained) -> str:
    width = max((len(f"{option} = {value}") for option, value, _ in part.choices), default=0)
    lines = [part.title]
    lines += [f"  {f'{option} = {value}':<{width}}  {why}" for option, value, why in part.choices]
    lines += [f"  {line}" for line in part.measured]
    lines += [f"  {line}".rstrip() for line in render_text(part.proposals).split("\n") if part.proposals]
    return "\n".join(lines)


def _render_html(part: Explained) -> str:
    rows = "".join(
        f'<tr><td style="text-align:left"><code>{escape(option)} = {escape(value)}</code></td>'
        f'<td style="text-align:left">{escape(why)}</td></tr>'
        for option, value, why in part.choices
    )
    seen = "".join(f"<div>{escape(line)}</div>" for line in part.measured)
    table = f"<table>{rows}</table>" if rows else ""
    return f"<div><b>{escape(part.title)}</b></div>{table}{seen}{render_html(part.proposals) if part.proposals else ''}"
