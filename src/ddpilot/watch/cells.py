# SPDX-License-Identifier: Apache-2.0
"""Cells of a notebook whose functions were launched: IPython's file names for them, and the names that people know."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ddpilot.findings.finding import Finding


def label_cells(files: Iterable[str]) -> dict[str, str]:
    """``Cell In[3]`` for each of `files` that is a cell of this process; empty where this is no IPython."""
    interactive_shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if interactive_shell is None or not interactive_shell.initialized():
        return {}
    label = getattr(interactive_shell.instance().compile, "format_code_name", lambda name: None)
    return {file: " ".join(found) for file in files if (found := label(file))}


def rename(text: str, labels: Mapping[str, str]) -> str:
    """`text` with every file of `labels` under its label."""
    for file, label in labels.items():
        text = text.replace(file, label)
    return text


def rename_in(finding: Finding, labels: Mapping[str, str]) -> Finding:
    """`finding` with every file of `labels` under its label."""
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
