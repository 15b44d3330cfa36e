# SPDX-License-Identifier: Apache-2.0
"""`%%ddp`: run the cell below on the ranks, in the notebook, or on both."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

from ddpilot.magics.parser import MagicParser, MagicUsageError, parse_ranks
from ddpilot.magics.shell_session import Desk, briefly


def make_cell_parser() -> MagicParser:
    """Return the parser of the options of `%%ddp`."""
    parser = MagicParser("%%ddp", description="Run the cell below on the ranks.")
    parser.add_argument("--ranks", metavar="0,2-3", type=parse_ranks, help="on these ranks; default: all that live")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="in the notebook alone, also while auto is on")
    place.add_argument("--everywhere", action="store_true", help="on the ranks and then in the notebook")
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--keep-cache", action="store_true", help="leave the GPU's memory cache as it is afterwards")
    return parser


def run_cell(desk: Desk, line: str, cell: str, verbs: Collection[str]) -> Any:
    """Run `cell` with the options in `line`. Return what a cell magic in it returns in the notebook, else None.

    `verbs`: the verbs of `%ddp`. Raises RankError, LaunchInterrupted, MagicUsageError.
    """
    words = line.split()
    if words and not words[0].startswith("-"):
        raise MagicUsageError(f"reading `%%ddp {line}`", found=f"`{words[0]}`", fix=_right(words[0], verbs))
    chosen = make_cell_parser().read(words)
    is_local, is_everywhere = chosen.pop("local", False), chosen.pop("everywhere", False)
    if is_local and chosen:
        names = " ".join(f"--{name.replace('_', '-')}" for name in sorted(chosen))
        flags = f"{names} {'is' if len(chosen) == 1 else 'are'}"
        raise MagicUsageError(
            f"reading `%%ddp {line}`",
            found=f"`--local` runs the cell in the notebook, and {flags} about the ranks",
            fix="Leave one of them out, or take `--everywhere` for both",
        )
    if not cell.strip():
        raise MagicUsageError("running a cell on the ranks", found="nothing below `%%ddp`", fix="Write the code there")
    if not is_local:
        run_on_ranks(desk, number_lines(line, cell), chosen)
    return run_here(desk, cell) if is_local or is_everywhere else None


def run_on_ranks(desk: Desk, code: str, chosen: dict[str, Any]) -> None:
    """Run `code`, whose lines are numbered as in the notebook's cell, on the ranks."""
    session = desk.need("running a cell on the ranks")
    with briefly():
        session.execute(
            code,
            ranks=chosen.get("ranks"),
            quiet=chosen.get("quiet", False),
            keep_cache=chosen.get("keep_cache"),
            cell=_cell_number(desk.shell),
        )


def _cell_number(shell: Any) -> int:
    """Return the number of the running cell. Newer versions of IPython have already incremented `execution_count`."""
    number: int = shell.execution_count
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = shell.compile.format_code_name(frame.f_code.co_filename)  # ("Cell", "In[7]") for a cell's code
        found = re.search(r"\d+", name[1]) if name else None
        number = int(found[0]) if found else number
        frame = frame.f_back
    return number


def run_here(desk: Desk, cell: str) -> Any:
    """Run `cell` in the notebook only, also while auto is on. Return what a cell magic in it returns, else None."""
    with desk.local():
        first, _, body = cell.lstrip().partition("\n")
        if first.startswith("%%"):
            name, _, line = first[2:].partition(" ")
            return desk.shell.run_cell_magic(name, line, body)
        desk.shell.run_cell(cell).raise_error()
        return None


def number_lines(line: str, cell: str) -> str:
    """Return `cell` with a first line in place of the notebook's `%%ddp`, so that errors name the notebook's lines.

    The line is a comment, as IPython drops leading blank lines. A cell magic has to remain the first line.
    """
    if cell.lstrip().startswith("%%"):
        return cell
    return f"# %%ddp {line}".rstrip() + f"\n{cell}"


def _right(word: str, verbs: Collection[str]) -> str:
    if word in verbs:
        return f"A verb is a line of its own, with one %: `%ddp {word}`"
    return "Options begin with --, as in `%%ddp --ranks 0`; the code stands in the lines below"
