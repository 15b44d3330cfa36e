# SPDX-License-Identifier: Apache-2.0
"""`LintOptions`: which rules and files are checked, from arguments or ``[tool.ddpilot.lint]`` in pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddpilot.errors import DdpilotError
from ddpilot.lint.rules import CODES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """Which codes are reported, and in which files. ``DDP4`` stands for all codes that begin with it."""

    select: tuple[str, ...] = ()
    """Codes to report; all if empty."""
    ignore: tuple[str, ...] = ()
    """Codes not to report, whether selected or not."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not checked, such as ``build`` or ``tests/*``."""

    def __post_init__(self) -> None:
        for each in (*self.select, *self.ignore):
            if not each or not any(code.startswith(each) for code in CODES):
                raise DdpilotError(
                    "choosing rules", found=f"no rule's code begins with {each!r}", fix=f"Rules: {', '.join(CODES)}"
                )

    def has(self, code: str) -> bool:
        """Return True if `code` is reported."""
        return (not self.select or code.startswith(self.select)) and not (self.ignore and code.startswith(self.ignore))


def read_options(folder: Path) -> LintOptions:
    """Return the options in the pyproject.toml of `folder` or of the nearest folder above it.

    Raises `DdpilotError` if the file cannot be read, or for an unknown option.
    """
    for each in (folder, *folder.parents):
        if (path := each / "pyproject.toml").is_file():
            try:
                table = tomllib.loads(path.read_text("utf-8")).get("tool", {}).get("ddpilot", {}).get("lint", {})
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise DdpilotError(f"reading {path}", found=str(error), fix="Correct the file") from error
            return _options_in(table, path)
    return LintOptions()


def _options_in(table: Mapping[str, Any], path: Path) -> LintOptions:
    known = [field.name for field in fields(LintOptions)]
    for name, value in table.items():
        if name not in known or not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise DdpilotError(
                f"reading [tool.ddpilot.lint] in {path}",
                found=f"{name} = {value!r}",
                fix=f"Give lists of strings for {', '.join(known)}",
            )
    return LintOptions(**{name: tuple(value) for name, value in table.items()})
