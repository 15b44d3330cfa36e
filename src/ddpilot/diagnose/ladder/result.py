# SPDX-License-Identifier: Apache-2.0
"""`ProgramDiagnosis`: what each rung of the ladder found, and the set-up checklist, as text, HTML or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from ddpilot.findings.display import Findings, render_html, screen_size
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable
from ddpilot.user_files import CodeLine

RungStatus = Literal["ok", "wrong", "not reached"]
ItemStatus = Literal["ok", "wrong", "not seen"]
RUNGS = {
    "a": "as one process",
    "b": "machine",
    "c": "process group",
    "d": "first batch",
    "e": "first backward",
    "f": "1 rank and all",
    "g": "communication",
}
"""Names of the rungs by their letters, in order."""
SECTIONS = ("before training", "model", "data", "loop", "checkpoints", "clean-up")
"""Sections of the checklist, in order."""
_MIN_HEIGHT = 24
"""Lines for findings, on any screen: what to do must not be cut for the sake of the checklist."""
_MORE = "`ddpilot doctor -v`"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder."""

    letter: str
    """A key of `RUNGS`."""
    status: RungStatus
    evidence: str = ""
    """Result of the rung in one line."""
    findings: tuple[Finding, ...] = ()
    """Errors of a rung that is wrong; warnings of a rung that is ok."""

    @property
    def name(self) -> str:
        """Name of the point."""
        return RUNGS[self.letter]

    def to_dict(self) -> dict[str, Any]:
        """Return the rung as JSON-serializable values."""
        return {
            "rung": self.letter,
            "name": self.name,
            "status": self.status,
            "evidence": self.evidence,
            "findings": [each.to_dict() for each in self.findings],
        }


@dataclass(frozen=True, kw_only=True)
class Item:
    """One point of the checklist."""

    section: str
    """One of `SECTIONS`."""
    name: str
    status: ItemStatus
    evidence: str = ""
    """Observed value, or the fault."""
    code: str = ""
    """Code of the finding that says what is wrong; "" if it is not wrong."""
    place: CodeLine | None = None
    """The line, if it is known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the item as JSON-serializable values."""
        place = None if self.place is None else {"file": self.place.file, "line": self.place.line}
        return {
            "section": self.section,
            "item": self.name,
            "status": self.status,
            "evidence": self.evidence,
            "code": self.code,
            "place": place,
        }

    def render(self) -> str:
        """Return the item in one line, without its section."""
        where = f"({self.place.file}:{self.place.line})" if self.place is not None else ""
        rest = " ".join(" ".join((where, self.code, self.evidence)).split())
        return f"{self.status:<9} {self.name:<30} {rest}".rstrip()


@dataclass(frozen=True, kw_only=True, repr=False)
class ProgramDiagnosis:
    """The result of `check_program`. Displays itself in a terminal and in a notebook."""

    title: str
    """The program and the number of ranks."""
    rungs: tuple[Rung, ...]
    """All rungs in order; those after the first that is wrong were not reached."""
    checklist: tuple[Item, ...] = ()
    """The set-up of the program point by point, in the order of `SECTIONS`."""
    notes: tuple[str, ...] = ()
    """Changes that made the runs comparable, one sentence each."""

    @property
    def failed(self) -> Rung | None:
        """The rung that is wrong; None if all are ok."""
        return next((rung for rung in self.rungs if rung.status == "wrong"), None)

    @property
    def findings(self) -> Findings:
        """Findings of all rungs, each once, errors first."""
        return Findings(dict.fromkeys(finding for rung in self.rungs for finding in rung.findings), more=_MORE)

    @property
    def exit_status(self) -> int:
        """1 if a rung or an item of the checklist is wrong, otherwise 0."""
        return int(self.failed is not None or any(item.status == "wrong" for item in self.checklist))

    @property
    def summary(self) -> str:
        """The result in a few words."""
        failed, num_wrong = self.failed, sum(item.status == "wrong" for item in self.checklist)
        ladder = "all rungs are ok" if failed is None else f"stopped at {failed.letter}, {failed.name}"
        return f"{ladder}; {num_wrong} of {len(self.checklist)} points of the checklist are wrong"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        return {
            "title": self.title,
            "summary": self.summary,
            "findings": self.findings.to_list(),
            "rungs": [rung.to_dict() for rung in self.rungs],
            "checklist": [item.to_dict() for item in self.checklist],
            "notes": list(self.notes),
        }

    def render(self, *, verbose: bool = False, color: bool = False) -> str:
        """Return the text: a line for each rung, what is wrong and what to do, and the checklist.

        `verbose`: lines are not cut to the width of the screen, and remarks are shown. `color`: use ANSI colors.
        """
        width, lines = screen_size()
        shown = Findings((each for each in self.findings if verbose or each.severity != "info"), more=_MORE)
        rows, items = self._rows(), self._list()
        height = None if verbose else max(_MIN_HEIGHT, lines - len(rows) - len(items) - len(self.notes) - 5)
        blocks = [
            f"{self.title}: {self.summary}",
            "\n".join(_cut(row, None if verbose else width) for row in rows),
            shown.render(width, color, height=height),
            "\n".join(_cut(row, None if verbose else width) for row in items),
            "\n".join(self.notes),
        ]
        return "\n\n".join(filter(None, blocks))

    def _rows(self) -> list[str]:
        rows = []
        for rung in self.rungs:
            text = " ".join(printable(rung.evidence).split())
            rows.append(f"{rung.letter}  {rung.name:<15} {rung.status:<11} {text}".rstrip())
        return rows

    def _list(self) -> list[str]:
        rows = []
        for section in SECTIONS:
            if items := [item for item in self.checklist if item.section == section]:
                rows += [section, *(f"  {printable(item.render())}" for item in items)]
        return rows

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"ProgramDiagnosis({self.title!r}, {self.summary!r})"

    def _repr_html_(self) -> str:
        shown = [each for each in self.findings if each.severity != "info"]
        rows, items = (escape("\n".join(each)) for each in (self._rows(), [*self._list(), "", *self.notes]))
        head = f"<p><b>{escape(printable(self.title))}</b>: {escape(self.summary)}</p>"
        return f"<div>{head}<pre>{rows}</pre>{render_html(shown) if shown else ''}<pre>{items.rstrip()}</pre></div>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))


def complete(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Return `rungs` with those that were not reached."""
    missing = list(RUNGS)[len(rungs) :]
    return (*rungs, *(Rung(letter=letter, status="not reached") for letter in missing))


def _cut(row: str, width: int | None) -> str:
    return row if width is None or len(row) <= width else f"{row[: width - 3]}..."
