# SPDX-License-Identifier: Apache-2.0
"""Show notebook cells by the names users know instead of IPython's file names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ddpilot.findings.finding import Finding


def label_cells(files: Iterable[str]) -> dict[str, str]:
    """Map each of `files` that is a cell of this process to a label such as ``Cell In[3]``; empty outside IPython."""
    interactive_shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if interactive_shell is None or not interactive_shell.initialized():
        return {}
    label = getattr(interactive_shell.instance().compile, "format_code_name", lambda name: None)
    return {file: " ".join(found) for file in files if (found := label(file))}


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
