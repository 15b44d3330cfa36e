# SPDX-License-Identifier: Apache-2.0
"""`DdpMagics`: the `%ddp` line magic and the `%%ddp` cell magic."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, needs_local_scope

from ddpilot.errors import did_you_mean
from ddpilot.magics.commands import COMMANDS
from ddpilot.magics.parser import VERBS, MagicUsageError, make_cell_parser, overview
from ddpilot.magics.push_pull import RETURNED, SCOPE
from ddpilot.magics.shell_session import ShellSession, briefly
from ddpilot.option_parser import HelpRequested

if TYPE_CHECKING:
    from ddpilot.profiler.result import Profile

WHOLE = "--whole"
"""Marks a line of `%%ddp` that ddpilot itself generates: the cell's lines are already numbered."""

ABOVE = "--above-code"
"""Marks a line of `%ddp` that ddpilot itself generates, in place of a cell that starts with `%ddp` above code."""


@magics_class
class DdpMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell_session: ShellSession) -> None:
        super().__init__(shell_session.shell)
        self._shell_session = shell_session

    @needs_local_scope
    @line_cell_magic
    def ddp(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Persistent ranks: ``%ddp start -n 2`` starts them, ``%%ddp`` runs a cell there, ``%ddp help`` shows more."""
        try:
            if cell is None:
                return self._verb(line, local_ns)
            words = line.split()
            if words[:1] == [WHOLE]:
                return run_on_ranks(self._shell_session, cell, make_cell_parser().read(words[1:]))
            return run_cell(self._shell_session, line.strip(), cell)
        except HelpRequested as helped:
            self._shell_session.write(str(helped))
        return None

    @line_magic("%ddp")  # type: ignore[arg-type]  # partly untyped
    def below(self, line: str) -> None:
        """Refuse ``%%ddp`` below the first line of a cell, where IPython parses it as a line magic with this name."""
        typed = f"%%ddp {line}".rstrip()
        raise MagicUsageError(
            f"reading `{typed}`",
            found="it is not the first line of its cell. The lines above ran in the notebook; those below did not run",
            fix="Make it the first line, above comments too",
        )

    def _verb(self, line: str, local_ns: dict[str, Any] | None) -> Any:
        name, _, rest = line.strip().partition(" ")
        if name == ABOVE:
            raise MagicUsageError(
                f"reading `{f'%ddp {rest}'.rstrip()}`",
                found="`%ddp` is for a single line, but there is code below it. The cell was not run",
                fix=f"Did you mean `{f'%%ddp {rest}'.rstrip()}`?",
            )
        if name in ("", "help", "-h", "--help"):
            raise HelpRequested(overview())
        if name not in VERBS:
            raise MagicUsageError(
                f"reading `%ddp {line.strip()}`", found=f"`{name}` is not a verb", fix=_explain_verb(name)
            )
        is_returned = rest.startswith(RETURNED)
        try:
            words = VERBS[name].split(rest.removeprefix(RETURNED).strip())
        except ValueError as error:
            raise MagicUsageError(f"reading `%ddp {line}`", found=str(error), fix="Close the quotes") from error
        given = VERBS[name].parser().read(words)
        given |= {SCOPE: self._scope(local_ns), "is_returned": is_returned}
        return COMMANDS[name](self._shell_session, given)

    def _scope(self, local_ns: dict[str, Any] | None) -> dict[str, Any]:
        """Return the variables that the line can use: the notebook's, and in a function also its local variables."""
        names: dict[str, Any] = self._shell_session.shell.user_ns
        return names if local_ns is None or local_ns is names else {**names, **local_ns}


def _explain_verb(name: str) -> str:
    if name.startswith("-"):
        return f"Options without a verb belong to the cell magic: write `%%ddp {name} ...` above the code"
    return did_you_mean(name, VERBS) or f"The verbs are {', '.join(VERBS)}; to run code, put it below `%%ddp`"


def run_cell(shell_session: ShellSession, line: str, cell: str) -> Any:
    """Run `cell` with the options in `line`. Return its profile, or what a cell magic in it returns in the notebook.

    Raises RankError, LaunchInterrupted, MagicUsageError.
    """
    words = line.split()
    if words and not words[0].startswith("-"):
        raise MagicUsageError(f"reading `%%ddp {line}`", found=f"`{words[0]}`", fix=_explain_word(words[0]))
    chosen = make_cell_parser().read(words)
    is_local, is_everywhere = chosen.pop("local", False), chosen.pop("everywhere", False)
    if is_local and chosen:
        names = " ".join(f"--{name.replace('_', '-')}" for name in sorted(chosen))
        flags = f"{names} {'is' if len(chosen) == 1 else 'are'}"
        raise MagicUsageError(
            f"reading `%%ddp {line}`",
            found=f"`--local` runs the cell in the notebook, and {flags} about the ranks",
            fix="Leave one of them out, or use `--everywhere` for both",
        )
    if not cell.strip():
        raise MagicUsageError(
            "running a cell on the ranks", found="there is no code below `%%ddp`", fix="Write the code there"
        )
    profile = None if is_local else run_on_ranks(shell_session, number_lines(line, cell), chosen)
    value = run_here(shell_session, cell) if is_local or is_everywhere else None
    return value if profile is None else profile


def run_on_ranks(shell_session: ShellSession, code: str, chosen: dict[str, Any]) -> Profile | None:
    """Run `code`, whose lines are numbered as in the notebook's cell, on the ranks. Return its profile."""
    session = shell_session.require("running a cell on the ranks", chosen.get("ranks"), "--ranks")
    name: str | None = chosen.get("profile")
    with briefly():
        result = session.execute(
            code,
            ranks=chosen.get("ranks"),
            quiet=chosen.get("quiet", False),
            keep_cache=chosen.get("keep_cache"),
            cell=_cell_number(shell_session.shell),
            profile=name is not None,
        )
    if result.no_profile:
        shell_session.report(f"no profile: {result.no_profile}")
    if name:  # None without a profile: the one of an earlier cell would be taken for it
        shell_session.shell.push({name: result.profile}, interactive=True)
    return result.profile


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


def run_here(shell_session: ShellSession, cell: str) -> Any:
    """Run `cell` in the notebook only, also while auto is on. Return what a cell magic in it returns, else None."""
    with shell_session.local():
        first, _, body = cell.lstrip().partition("\n")
        if first.startswith("%%"):
            name, _, line = first[2:].partition(" ")
            return shell_session.shell.run_cell_magic(name, line, body)
        shell_session.shell.run_cell(cell).raise_error()
        return None


def number_lines(line: str, cell: str) -> str:
    """Return `cell` with a first line in place of the notebook's `%%ddp`, so that errors name the notebook's lines.

    The line is a comment, as IPython drops leading blank lines. A cell magic has to remain the first line.
    """
    if cell.lstrip().startswith("%%"):
        return cell
    return f"# %%ddp {line}".rstrip() + f"\n{cell}"


def _explain_word(word: str) -> str:
    if word in VERBS:
        return f"Write a verb with one %, on a line of its own: `%ddp {word}`"
    return "Options begin with --, as in `%%ddp --ranks 0`; the code goes in the lines below"
