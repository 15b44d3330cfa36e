# SPDX-License-Identifier: Apache-2.0
"""`Explanation`: the options that `prepare` chose, their reasons and costs, and proposals; as text and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from ddpilot.findings.as_html import render_html
from ddpilot.findings.as_text import render_text
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.training.models.ddp_options import Choice


@dataclass(frozen=True)
class Explained:
    """The explanation of one model or optimizer that `prepare` returned."""

    title: str
    """Its class, and how it was wrapped."""
    choices: tuple[Choice, ...] = ()
    """Every option with its reason; empty if nothing was wrapped."""
    measured: tuple[str, ...] = ()
    """Measurements so far, one per line."""
    proposals: tuple[Finding, ...] = ()
    """Changes that the measurements suggest; none of them is applied automatically."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanations of all prepared objects, in order; printed as text, shown as a table in a notebook."""

    parts: tuple[Explained, ...]

    @property
    def proposals(self) -> Findings:
        """The proposals of all parts."""
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
