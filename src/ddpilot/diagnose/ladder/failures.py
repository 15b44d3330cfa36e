# SPDX-License-Identifier: Apache-2.0
"""Explain a run that failed: the findings of its watch, the error that ended it, and the user's line."""

from __future__ import annotations

import re
from dataclasses import replace

from ddpilot.diagnose.verify.target import Run
from ddpilot.findings.catalog import find_known, make_finding
from ddpilot.findings.finding import Finding
from ddpilot.user_files import CodeLine, is_users, label_cell

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    (?P<text>.+))?', re.M)
_MAX_LINES = 5


def explain_failure(run: Run, summary: str = "") -> tuple[Finding, ...]:
    """Return the errors that watch and guard found in `run`, or else a finding about the error that ended it.

    `summary`: what to say if neither is there.
    """
    errors = tuple(each for each in run.findings if each.severity == "error")
    if errors:
        return errors
    where = f"{run.nproc_per_node} rank{'s' * (run.nproc_per_node > 1)}"
    if run.error is None:
        return (make_finding("DDP830", summary=summary or f"on {where} no optimizer made a step"),)
    known = find_known(str(run.error))
    traceback = str(getattr(run.error, "rank_traceback", ""))
    last = tuple(getattr(run.error, "last_lines", ()))[-_MAX_LINES:] if not traceback else ()
    return (
        make_finding(
            known[0].code if known else "DDP830",
            summary=f"the run on {where} failed: {run.error.found}",
            ranks=() if run.error.rank is None else (run.error.rank,),
            line=find_line(traceback),
            evidence=(f"{_plural(run.num_updates)} before it", *last),
            fix=run.error.fix.rstrip("."),
            severity="error",
        ),
    )


def _plural(num: int) -> str:
    return f"{num or 'no'} update{'s' * (num != 1)}"


def find_line(traceback: str) -> CodeLine | None:
    """Return the innermost line of the user in the text of a traceback; None if there is none."""
    frames = [found for found in _FRAME.finditer(traceback) if is_users(found["file"])]
    if not frames:
        return None
    found = frames[-1]
    return CodeLine(label_cell(found["file"]), int(found["line"]), found["function"], found["text"] or "")


def label_place(finding: Finding) -> Finding:
    """Return `finding` with the label of its cell, such as ``Cell In[3]``, which a rank does not know."""
    if finding.place is None or (label := label_cell(finding.place.file)) == finding.place.file:
        return finding
    return replace(finding, place=replace(finding.place, file=label))
