# SPDX-License-Identifier: Apache-2.0
"""`Verification`: whether one rank and several compute the same, as text, HTML or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from ddpilot.findings.display import Findings, render_html, render_text, screen_size
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable

Verdict = Literal["equal", "different", "unknown"]
_MORE = "`ddpilot verify -v`"


@dataclass(frozen=True, kw_only=True)
class UpdateRow:
    """One update in both runs."""

    update: int
    """Number of the update, from 1."""
    site: str
    """The user's line that called `step`."""
    num_samples: tuple[int, int]
    """Samples on one rank, and on all ranks of the other run; 0 where no DataLoader was seen."""
    losses: tuple[float | None, float | None]
    """What backward was called on: on one rank, and the mean over all ranks; None without a loss."""
    gradient: float
    """Largest difference of a gradient, relative to the gradient."""
    parameter: float
    """Largest difference of a parameter after the step, relative to the parameter."""
    same_states: tuple[str, ...] = ()
    """Random number generators that have the same state on all ranks of the other run after the step."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """The result of `verify`. Displays itself in a terminal and in a notebook."""

    title: str
    """The program and the numbers of ranks."""
    verdict: Verdict
    """"equal" up to rounding, "different", or "unknown" if the runs cannot be compared."""
    summary: str
    """The first difference, or why there is none, in one sentence."""
    findings: tuple[Finding, ...] = ()
    """What explains a difference, errors first."""
    rows: tuple[UpdateRow, ...] = ()
    """The updates that were compared."""
    floors: Mapping[str, float] | None = None
    """Measured noise: the largest relative difference of each pair of repeated runs, by the name of the pair."""
    notes: tuple[str, ...] = ()
    """Changes that made the runs comparable, one sentence each."""
    details: str = ""
    """Traceback of the error that ended a run, without the error's first line; empty without an error."""

    @property
    def is_equal(self) -> bool:
        """True if the numbers agree up to rounding."""
        return self.verdict == "equal"

    @property
    def exit_status(self) -> int:
        """0 if the numbers agree and no error was found, otherwise 1."""
        return int(not self.is_equal or any(each.severity == "error" for each in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "summary": self.summary,
            "findings": Findings(self.findings).to_list(),
            "updates": [asdict(each) for each in self.rows],
            "floors": dict(self.floors or {}),
            "notes": list(self.notes),
            "details": self.details,
        }

    def render(self, *, verbose: bool = False, color: bool = False) -> str:
        """Return the text. `verbose`: with a line for each update. `color`: use ANSI colors."""
        width, lines = screen_size()
        table = self._table() if verbose or self.verdict == "different" else []
        rest = [*self._measured(), *self.notes]
        height = None if verbose else max(5, lines - len(table) - len(rest) - 5)
        found = render_text(self.findings, width, color, height=height, more=_MORE) if self.findings else ""
        head = f"{self.title}: {self.verdict}\n{printable(self.summary)}"
        details = "\n".join(map(printable, self.details.splitlines()))
        return "\n\n".join(filter(None, [head, details, found, "\n".join(table), "\n".join(rest)]))

    def _table(self) -> list[str]:
        lines = ["update    samples      loss                     gradients differ by  parameters differ by"]
        for row in self.rows:
            samples = " | ".join(map(str, row.num_samples))
            losses = " | ".join("-" if each is None else f"{each:.6g}" for each in row.losses)
            lines.append(f"{row.update:<8}  {samples:<11}  {losses:<23}  {row.gradient:<19.1e}  {row.parameter:.1e}")
        return lines if self.rows else []

    def _measured(self) -> list[str]:
        return [f"{name}: {value:.1e}" for name, value in (self.floors or {}).items()]

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Verification({self.title!r}, {self.verdict!r})"

    def _repr_html_(self) -> str:
        rest = "\n".join([*self.details.splitlines(), *self._table(), "", *self._measured(), *self.notes])
        head = f"<p><b>{escape(printable(self.title))}: {self.verdict}</b><br>{escape(printable(self.summary))}</p>"
        found = render_html(self.findings) if self.findings else ""
        return f"<div>{head}{found}<pre>{escape(printable(rest))}</pre></div>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))
