# SPDX-License-Identifier: Apache-2.0
"""`ddpilot lint` over 1,000 files of site-packages that mention torch, against `ast.parse` alone."""

from __future__ import annotations

import ast
import contextlib
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.measure import Row, alternate, main, render_values, seconds
from ddpilot.lint.linter import LintOptions, find_files, is_relevant, lint_files, read_text

NUM_FILES = 1_000
LIMIT_S = 60.0


def relevant_files() -> Iterator[str]:
    """Files that the rules look into; all others are read and passed over."""
    for path in find_files([sysconfig.get_path("purelib")]):
        if is_relevant(read_text(Path(path))):
            yield path


def parse(paths: list[str]) -> None:
    """Parse each file, as every linter has to."""
    for path in paths:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            ast.parse(read_text(Path(path)))


def measure(rounds: int) -> list[Row]:
    """The bar, `rounds` times."""
    paths = list(islice(relevant_files(), NUM_FILES))
    ours, parsing = alternate(
        lambda: seconds(lambda: list(lint_files(paths, LintOptions(), lambda path, reason: None))),
        lambda: seconds(lambda: parse(paths)),
        rounds,
    )
    return [
        Row(
            what=f"`ddpilot lint` of {len(paths)} files that mention torch, `ast.parse` of them",
            ours=render_values(ours),
            peer=render_values(parsing),
            ratio=f"{min(ours) / min(parsing):.1f}",
            bar=f"{LIMIT_S:.0f} s",
            holds=max(ours) < LIMIT_S,
        )
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, rounds=2))
