# SPDX-License-Identifier: Apache-2.0
"""`Diagnosis`: the lines of all checks, sorted by severity, as text, HTML or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from ddpilot.diagnose.facts import Answer, RankReport
from ddpilot.findings.display import Findings, render_html, screen_size
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable

_MORE = "`ddpilot doctor -v`"
NODES = "nodes"
"""Subject of the lines about the way between nodes, which name nodes themselves."""


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
        finding = self.answer if isinstance(self.answer, Finding) else None
        return {
            "check": self.check,
            "subject": self.subject,
            "status": self.status,
            "nodes": list(self.nodes),
            "found": finding.summary if finding else self.answer,
            "finding": finding.to_dict() if finding else None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Line:
        """Return the line that `to_dict` wrote."""
        answer = values["found"] if values["finding"] is None else Finding.from_dict(values["finding"])
        return cls(values["check"], values["subject"], answer, tuple(values["nodes"]))


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `doctor`. Displays itself in a terminal and in a notebook; at most one screen."""

    title: str
    """The machine or job that was checked."""
    lines: tuple[Line, ...]
    """The lines of all checks, in the order of the checks."""
    settings: tuple[str, ...] = ()
    """Lines to paste into a shell, each with its evidence as a comment."""
    ranks: tuple[RankReport, ...] = ()
    """The report of each rank, with all times that it measured."""
    is_shown: bool = True
    """False on a rank whose diagnosis is that of rank 0, which shows it."""

    @property
    def findings(self) -> Findings:
        """The findings of all checks: errors first, then warnings."""
        return Findings((line.answer for line in self.lines if isinstance(line.answer, Finding)), more=_MORE)

    @property
    def exit_status(self) -> int:
        """1 if there is an error, otherwise 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        return {
            "title": self.title,
            **self._counts(),
            "findings": self.findings.to_list(),
            "lines": [line.to_dict() for line in self.lines],
            "settings": list(self.settings),
            "ranks": [asdict(each) for each in self.ranks],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """Return the diagnosis that `to_dict` converted."""
        ranks = tuple(RankReport(**each) for each in values["ranks"])
        return cls(values["title"], tuple(map(Line.from_dict, values["lines"])), tuple(values["settings"]), ranks)

    def render(self, *, verbose: bool = False, height: int | None = None, color: bool = False) -> str:
        """Return the text: findings by severity, then a line for each check that is ok.

        `height`: lines of the screen, by default the terminal's; with `verbose` everything is shown whatever its
        length. `color`: use ANSI colors.
        """
        width, lines = screen_size()
        height = height or lines
        ok = [line for line in self.lines if line.status == "ok"]
        rows = _ok_rows(ok, None if verbose else width)
        found = self.findings.render(width, color)
        if not verbose and found.count("\n") + len(rows) + len(self.settings) + 6 > height:
            rows = _ok_names(ok)
            room = max(5, height - len(rows) - len(self.settings) - 5)
            found = self.findings.render(width, color, height=room)
        paste = ["to paste:", *self.settings] if self.settings else []
        blocks = [f"{self.title}: {self._summary()}", found, "\n".join(paste), "\n".join(rows)]
        return "\n\n".join(filter(None, blocks))

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


def merge_nodes(by_node: Mapping[int, Sequence[Line]]) -> Iterator[Line]:
    """Yield each line of the nodes once, in their order, with the nodes that it is about unless these are all."""
    found: dict[tuple[str, str, Answer], list[int]] = {}
    for node, lines in sorted(by_node.items()):
        for line in lines:
            found.setdefault((line.subject, line.check, line.answer), []).append(node)
    order = list(dict.fromkeys(check for _, check, _ in found))
    for (subject, check, answer), nodes in sorted(found.items(), key=lambda item: order.index(item[0][1])):
        is_everywhere = len(nodes) == len(by_node)
        if isinstance(answer, Finding) and not is_everywhere and subject != NODES:
            where = f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
            answer = replace(answer, summary=f"{where}: {answer.summary}")
        yield Line(check, subject, answer, () if is_everywhere else tuple(nodes))


def _ok_rows(lines: Sequence[Line], width: int | None) -> list[str]:
    """A row for each line; on a screen of `width` columns one for each check, which is cut to fit."""
    by_check: dict[str, list[Line]] = {}
    for line in lines:
        by_check.setdefault(line.check, []).append(line)
    rows = []
    for check, same in by_check.items():
        for line in same if width is None else same[:1]:
            more = f" (and {len(same) - 1} more)" if width is not None and len(same) > 1 else ""
            text = f"ok  {check:<17} {_on_nodes(line)}{' '.join(printable(str(line.answer)).split())}"
            room = None if width is None else width - len(more)
            rows.append((text if room is None or len(text) <= room else f"{text[: room - 3]}...") + more)
    return rows


def _ok_names(lines: Sequence[Line]) -> list[str]:
    by_subject: dict[str, dict[str, None]] = {}
    for line in lines:
        by_subject.setdefault(line.subject, {})[line.check] = None
    return [f"ok  {subject}: {', '.join(names)}" for subject, names in by_subject.items()]


def _on_nodes(line: Line) -> str:
    return f"node {', '.join(map(str, line.nodes))}: " if line.nodes else ""
