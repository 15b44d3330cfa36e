# SPDX-License-Identifier: Apache-2.0
"""The report of an observer: its history, rendering, and file next to the rings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from ddpilot.environments.private_files import read_own_text, write_own_text
from ddpilot.errors import DdpilotError
from ddpilot.findings.display import Findings, render_html, render_text, screen_size
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import printable, render_ranks
from ddpilot.user_files import label_cell
from ddpilot.watch.analysis import Analysis

FORMAT = 1
_JSON, _TEXT = "report.json", "report.txt"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings and waits of a job. Renders itself in a terminal and in a notebook."""

    job: str
    """The job's id, as `ddpilot watch` lists it."""
    name: str
    world_size: int
    findings: Findings = field(default_factory=Findings)
    status: tuple[str, ...] = ()
    """Waits without proof of an error, one line each."""
    unseen: tuple[int, ...] = ()
    """Ranks about which nothing is known here: those of other nodes, and those that do not record."""
    notes: tuple[str, ...] = ()
    """Further information, one line each."""
    made_s: float = field(default_factory=time.time)
    """Unix time in seconds."""

    @property
    def more(self) -> str:
        """The command that shows all findings, for `Findings.more`."""
        return f"`ddpilot watch {self.job} -v`"

    def render(self, *, verbose: bool = False, color: bool = False) -> str:
        """Return the text, which takes at most one screen unless it is `verbose`. `color`: use ANSI colors."""
        head = self._render_head()
        height = None if verbose else max(5, screen_size().lines - len(head) - 1)
        found = render_text(self.findings, color=color, height=height, more=self.more) if self.findings else ""
        return "\n\n".join(filter(None, ["\n".join(head), found]))

    def _render_head(self) -> list[str]:
        lines = [f"{self.name} on {self.world_size} rank{'s' * (self.world_size > 1)}, job {self.job}"]
        lines += [f"  {line}" for line in (*self.status, *self.notes)]
        if self.unseen:
            lines.append(f"  not visible from here: {render_ranks(self.unseen)}")
        if not (self.findings or self.status):
            lines.append("  no problem is visible")
        return printable("\n".join(lines)).split("\n")

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        head = f'<pre style="white-space:pre-wrap">{escape(chr(10).join(self._render_head()))}</pre>'
        return f"<div>{head}{render_html(self.findings) if self.findings else ''}</div>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        return {"format": FORMAT, **vars(self), "findings": self.findings.to_list()}

    def save(self, folder: Path) -> None:
        """Write the report to `folder` as JSON and as text, each file atomically. Raises `OSError`."""
        write_own_text(folder / _JSON, f"{json.dumps(self.to_dict(), indent=1, ensure_ascii=False)}\n")
        write_own_text(folder / _TEXT, f"{self.render(verbose=True)}\n")


def read_report(folder: Path) -> Report | None:
    """Read the report saved in `folder`; None if there is none. Raises `DdpilotError` for a damaged one."""
    path = folder / _JSON
    try:
        raw = json.loads(read_own_text(path))
        values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in raw.items()}
        del values["format"]
        values["findings"] = Findings(Finding.from_dict(each) for each in raw["findings"])
        return Report(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise DdpilotError(f"reading {path}", found=found, fix="Look at report.txt next to it") from error


def label_cells(files: Iterable[str]) -> dict[str, str]:
    """Map each of `files` that is a cell of this process to a label such as ``Cell In[3]``; empty outside IPython."""
    return {file: label for file in files if (label := label_cell(file)) != file}


def rename(text: str, labels: Mapping[str, str]) -> str:
    """Replace every file of `labels` in `text` by its label."""
    for file, label in labels.items():
        text = text.replace(file, label)
    return text


def rename_in(finding: Finding, labels: Mapping[str, str]) -> Finding:
    """Replace every file of `labels` in the texts of `finding` by its label."""
    if not labels:
        return finding
    place = finding.place
    return replace(
        finding,
        summary=rename(finding.summary, labels),
        place=None if place is None else replace(place, file=labels.get(place.file, place.file)),
        evidence=tuple(rename(line, labels) for line in finding.evidence),
        why=rename(finding.why, labels),
        fix=rename(finding.fix, labels),
    )


_QUIET_S = 1.5
"""A wait that resumes after a shorter break than this is the same wait."""

_OF_LAYERS = frozenset({"DDP408"})
"""Codes that describe the model and not the cell; their evidence names layers and numbers."""


class ReportHistory:
    """Findings and waits that were reported for a job or a cell.

    `again_s`: seconds until a persisting wait is reported again. `known`: codes and evidence of findings about layers,
    which are not reported again, whichever ranks have come that far.
    """

    def __init__(self, again_s: float, known: Iterable[tuple[str, tuple[str, ...]]] = ()) -> None:
        self.findings: list[Finding] = []
        self._again_s = again_s
        self._known = frozenset(known)
        self._keys: set[object] = set()
        self._due_s: float | None = None
        self._wait_s = again_s
        self._stalled_s: float | None = None

    def next_cell(self) -> ReportHistory:
        """Return the history of the next cell, which reports again everything but findings about layers."""
        shown = {(each.code, each.evidence) for each in self.findings if each.code in _OF_LAYERS}
        return ReportHistory(self._again_s, self._known | shown)

    def new_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that differ from all earlier ones, and add them to `findings`."""
        news = []
        for finding in findings:
            if self._keys.isdisjoint(_keys_of(finding)) and (finding.code, finding.evidence) not in self._known:
                news.append(finding)
            self._keys |= _keys_of(finding)
        self.findings += news
        return news

    def new_status(self, analysis: Analysis, now_s: float) -> tuple[str, ...]:
        """Return the status lines when ranks begin to wait, and then at intervals that double; empty otherwise."""
        if not analysis.is_stalled or not analysis.status:
            if self._stalled_s is None or now_s - self._stalled_s >= _QUIET_S:
                self._due_s = None
            return ()
        self._stalled_s = now_s
        if self._due_s is not None and now_s < self._due_s:
            return ()
        self._wait_s = self._again_s if self._due_s is None else 2 * self._wait_s
        self._due_s = now_s + self._wait_s
        return analysis.status

    def once(self, text: str) -> str:
        """Return `text` the first time, and an empty string afterwards."""
        is_new = text not in self._keys
        self._keys.add(text)
        return text if is_new else ""


def _keys_of(finding: Finding) -> set[object]:
    """Return the keys of a finding. Two findings that share one are the same: equal place, or equal summary."""
    return {(finding.code, finding.place or finding.summary), (finding.code, finding.summary)}


def newest(findings: Iterable[Finding]) -> list[Finding]:
    """Keep only the last of findings that are the same, in the position of the first."""
    kept: list[Finding] = []
    for finding in findings:
        same = next((at for at, each in enumerate(kept) if not _keys_of(each).isdisjoint(_keys_of(finding))), None)
        if same is None:
            kept.append(finding)
        else:
            kept[same] = finding
    return kept
