# SPDX-License-Identifier: Apache-2.0
"""``ddpilot lint``: report the faults of scripts and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.errors import DdpilotError
from ddpilot.lint.formats import FORMATS
from ddpilot.lint.linter import find_files, lint_files
from ddpilot.lint.options import read_options


def lint(paths: Sequence[str], *, select: str, ignore: str, output_format: str) -> int:
    """Print the reports for `paths`; return 1 if there are any, otherwise 0.

    `select`, `ignore`: codes with commas between; they replace those of pyproject.toml. Raises `DdpilotError` for an
    unknown code, format or path.
    """
    if output_format not in FORMATS:
        raise DdpilotError("linting", found=f"--format {output_format}", fix=f"Use one of {', '.join(FORMATS)}")
    options = read_options(Path.cwd())
    if select:
        options = replace(options, select=_codes(select))
    if ignore:
        options = replace(options, ignore=_codes(ignore))
    found = list(lint_files(find_files(paths, options.exclude), options, _report_unreadable))
    if found or output_format in ("json", "sarif"):
        print(FORMATS[output_format](found))
    return 1 if found else 0


def _codes(text: str) -> tuple[str, ...]:
    return tuple(each.strip().upper() for each in text.split(",") if each.strip())


def _report_unreadable(path: str, reason: str) -> None:
    print(f"{path}: not checked: {reason}", file=sys.stderr)
