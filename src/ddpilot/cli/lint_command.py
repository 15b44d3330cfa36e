# SPDX-License-Identifier: Apache-2.0
"""``ddpilot lint``: report the faults of scripts and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpilot.errors import DdpilotError
from ddpilot.lint.fixes import fix_text, render_diff
from ddpilot.lint.formats import FORMATS
from ddpilot.lint.linter import SUFFIXES, find_files, lint_files
from ddpilot.lint.options import LintOptions, read_options


def lint(
    paths: Sequence[str],
    *,
    select: str = "",
    ignore: str = "",
    output_format: str = "text",
    fix: bool = False,
    diff: bool = False,
) -> int:
    """Print the reports for `paths`; return 2 if a file of `paths` cannot be parsed, else 1 if there are any, else 0.

    A file in a folder that cannot be parsed does not change the status. If there is nothing to report, the text format
    prints the number of files to stderr.

    `fix`: print the changes as a diff, make them, and report what is left. `diff`: print the changes only; return 1 if
    there are any.

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
    files = list(find_files(paths, options.exclude))
    if fix or diff:
        changed = [each for each in files if _fix(each, options, writes=fix and not diff)]
        if diff:
            return 1 if changed else 0
    unreadable: list[str] = []

    def report_unreadable(path: str, reason: str) -> None:
        unreadable.append(path)
        print(f"{path}: not checked: {reason}", file=sys.stderr)

    found = list(lint_files(files, options, report_unreadable, named=paths))
    if found or output_format in ("json", "sarif"):
        print(FORMATS[output_format](found))
    elif output_format == "text" and not unreadable:
        checked = f"{len(files)} file{'s' * (len(files) != 1)} checked, nothing to report"
        print(checked if files else "no Python file or notebook found", file=sys.stderr)
    return 2 if set(unreadable) & set(paths) else 1 if found else 0


def _fix(path: str, options: LintOptions, *, writes: bool) -> bool:
    """Print the changes of one file as a diff, and make them if `writes`; return True if there are any."""
    if not path.endswith(SUFFIXES):
        return False
    try:
        before = Path(path).read_bytes().decode()
        after = fix_text(before, path, options)
    except (SyntaxError, ValueError, RecursionError, OSError):
        return False  # reported by the check
    print(render_diff(before, after, path), end="")
    if writes and after != before:
        Path(path).write_bytes(after.encode())
    return after != before


def _codes(text: str) -> tuple[str, ...]:
    return tuple(each.strip().upper() for each in text.split(",") if each.strip())
