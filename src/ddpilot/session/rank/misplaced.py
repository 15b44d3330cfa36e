# SPDX-License-Identifier: Apache-2.0
"""Errors for `%ddp` and `%%ddp` in cells that run on the ranks: they belong in the notebook."""

from __future__ import annotations

from typing import Any, NoReturn

from IPython.core.error import UsageError


def register_misplaced(shell: Any) -> None:
    """Register both magics in a rank's `shell`, to raise an error that explains them instead of "not found"."""
    shell.register_magic_function(_refuse, "line_cell", "ddp")
    shell.register_magic_function(_refuse_second, "line", "%ddp")  # `%%ddp` below a cell's first line


def _refuse(line: str, cell: str | None = None) -> NoReturn:
    """`%ddp` belongs in the notebook: this code runs on the ranks."""
    if cell is not None:
        _refuse_second(line)
    typed = f"%ddp {line}".rstrip()
    raise UsageError(
        f"`{typed}` is for the notebook, and this cell runs on the ranks. Use a cell without `%%ddp`, or while "
        "auto is on `%%ddp --local`"
    )


def _refuse_second(line: str) -> NoReturn:
    """`%%ddp` belongs in the notebook: this code runs on the ranks."""
    typed = f"%%ddp {line}".rstrip()
    raise UsageError(
        f"`{typed}` stands in a cell that runs on the ranks already. Leave it out; with options, make it the first line"
    )
