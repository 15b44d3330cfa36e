# SPDX-License-Identifier: Apache-2.0
"""The rules as a plugin of flake8: an entry point in pyproject.toml names `Plugin`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version

from ddpilot.lint.linter import lint_text


class Plugin:
    """Runs all rules over a file; flake8 selects codes and reads ``# noqa`` itself."""

    name = "ddpilot"
    version = version("ddpilot")

    def __init__(self, tree: ast.AST, lines: list[str]) -> None:  # noqa: ARG002 - flake8 asks for a tree by this name
        self._text = "".join(lines)

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield line, column from 0, text and type of each report."""
        for each in lint_text(self._text, "flake8.py"):
            yield each.line, each.column - 1, f"{each.code} {each.message}", type(self)
