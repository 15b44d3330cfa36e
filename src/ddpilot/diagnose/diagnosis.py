# SPDX-License-Identifier: Apache-2.0
"""`Diagnosis`: the lines of all checks, sorted by severity, as text, HTML or JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ddpilot.diagnose.facts import Answer
from ddpilot.findings.display import render_html, render_text
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable

_ORDER = ("error", "warning", "info")


@dataclass(frozen=True)
class Line:
    """One line of one check: what was found if it is ok, otherwise a finding. `nodes`: where; empty if everywhere."""

    check: str
    subject: str
    answer: Answer
    nodes: tuple[int, ...] = ()

    @property
    def status(self) -> str:
        """``ok``, ``info``, ``warning`` or ``error``."""
        return self.answer.severity if isinstance(self.answer, Finding) else "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON-serializable values."""
        named = {"check": self.check, "subject": self.subject, "status": self.status, "nodes": list(self.nodes)}
        found = self.answer
        return named | ({"found": found} if isinstance(found, str) else {"found": found.summary, **found.to_dict()})


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `doctor` found. Displays itself in a terminal and in a notebook; at most one screen."""

    title: str
    """The machine or job that was checked."""
    lines: tuple[Line, ...]
    """Of all checks, in their order."""
    settings: tuple[str, ...] = ()
    """Lines to paste into a shell, each with its evidence as a comment."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Errors first, then warnings; those with the same code together."""
        found = [line.answer for line in self.lines if isinstance(line.answer, Finding)]
        return tuple(sorted(found, key=lambda finding: (_ORDER.index(finding.severity), finding.code)))

    @property
    def exit_status(self) -> int:
        """1 if there is an error, otherwise 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        return {
            "title": self.title,
            **self._counts(),
            "lines": [line.to_dict() for line in self.lines],
            "settings": list(self.settings),
        }

    def render(self, *, verbose: bool = False, height: int | None = None, color: bool = False) -> str:
        """Return the text: findings by severity, then a line for each check that is ok.

        `height`: lines of the screen, by default the terminal's; with `verbose` everything is shown whatever its
        length. `color`: use ANSI colors.
        """
        width, lines = shutil.get_terminal_size((120, 40))
        height = height or lines - 2
        head = f"{self.title}: {self._summary()}"
        found = render_text(self.findings, width, color).splitlines() if self.findings else []
        ok = [line for line in self.lines if line.status == "ok"]
        rows = _ok_rows(ok, None if verbose else width)
        if not verbose and len(found) + len(rows) + len(self.settings) + 5 > height:
            rows = _ok_names(ok)
            room = max(5, height - len(rows) - len(self.settings) - 5)
            found = found if len(found) <= room else [*found[: room - 1], "... `ddpilot doctor -v` shows the rest"]
        blocks = [[head], found, ["to paste:", *self.settings] if self.settings else [], rows]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"Diagnosis({self.title!r}, {self._summary()})"

    def _repr_html_(self) -> str:
        found = render_html(self.findings) if self.findings else ""
        rows = "\n".join(_ok_rows([line for line in self.lines if line.status == "ok"], None))
        paste = f"<pre>{escape(chr(10).join(self.settings))}</pre>" if self.settings else ""
        ok = f"<details><summary>{self._counts()['ok']} ok</summary><pre>{escape(rows)}</pre></details>"
        return f"<div><b>{escape(self.title)}</b>: {self._summary()}</div>{found}{paste}{ok}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def _counts(self) -> dict[str, int]:
        statuses = [line.status for line in self.lines]
        return {"errors": statuses.count("error"), "warnings": statuses.count("warning"), "ok": statuses.count("ok")}

    def _summary(self) -> str:
        num = self._counts()
        errors, warnings = (f"{num[kind]} {kind[:-1] if num[kind] == 1 else kind}" for kind in ("errors", "warnings"))
        return f"{errors}, {warnings}, {num['ok']} ok"


def _ok_rows(lines: Sequence[Line], width: int | None) -> list[str]:
    rows = [f"ok  {line.check:<17} {_on_nodes(line)}{' '.join(printable(str(line.answer)).split())}" for line in lines]
    return [row if width is None or len(row) <= width else f"{row[: width - 3]}..." for row in rows]


def _ok_names(lines: Sequence[Line]) -> list[str]:
    by_subject: dict[str, dict[str, None]] = {}
    for line in lines:
        by_subject.setdefault(line.subject, {})[line.check] = None
    return [f"ok  {subject}: {', '.join(names)}" for subject, names in by_subject.items()]


def _on_nodes(line: Line) -> str:
    return f"node {', '.join(map(str, line.nodes))}: " if line.nodes else ""
