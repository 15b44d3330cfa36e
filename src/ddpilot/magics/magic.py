# SPDX-License-Identifier: Apache-2.0
"""`DdpMagics`: the `%ddp` line magic and the `%%ddp` cell magic."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, needs_local_scope

from ddpilot.errors import did_you_mean
from ddpilot.magics.cells import make_cell_parser, run_cell, run_on_ranks
from ddpilot.magics.commands import VERBS
from ddpilot.magics.parser import Helped, MagicUsageError
from ddpilot.magics.push_pull import RETURNED, SCOPE
from ddpilot.magics.shell_session import Desk

WHOLE = "--whole"
"""Marks a line of `%%ddp` that ddpilot itself generates: the cell's lines are already numbered."""

ABOVE = "--above-code"
"""Marks a line of `%ddp` that ddpilot itself generates, in place of a cell that starts with `%ddp` above code."""


@magics_class
class DdpMagics(Magics):
    """The magics of one shell."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk.shell)
        self._desk = desk

    @needs_local_scope
    @line_cell_magic
    def ddp(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Persistent ranks: ``%ddp start -n 2`` starts them, ``%%ddp`` runs a cell there, ``%ddp help`` shows more."""
        try:
            if cell is None:
                return self._verb(line, local_ns)
            words = line.split()
            if words[:1] == [WHOLE]:
                run_on_ranks(self._desk, cell, make_cell_parser().read(words[1:]))
                return None
            return run_cell(self._desk, line.strip(), cell, VERBS)
        except Helped as helped:
            self._desk.write(str(helped))
        return None

    @line_magic("%ddp")  # type: ignore[arg-type]  # partly untyped
    def below(self, line: str) -> None:
        """Refuse ``%%ddp`` below the first line of a cell, where IPython parses it as a line magic with this name."""
        typed = f"%%ddp {line}".rstrip()
        raise MagicUsageError(
            f"reading `{typed}`",
            found="it is not the first line of its cell. Nothing below it was run; the lines above ran in the notebook",
            fix="Make it the first line, above comments too",
        )

    def _verb(self, line: str, local_ns: dict[str, Any] | None) -> Any:
        name, _, rest = line.strip().partition(" ")
        if name == ABOVE:
            raise MagicUsageError(
                f"reading `{f'%ddp {rest}'.rstrip()}`",
                found="one % is for a line alone, and there is code below it. Nothing of the cell was run",
                fix=f"Did you mean `{f'%%ddp {rest}'.rstrip()}`?",
            )
        if name in ("", "help", "-h", "--help"):
            raise Helped(overview())
        if name not in VERBS:
            raise MagicUsageError(f"reading `%ddp {line.strip()}`", found=f"`{name}` is no verb", fix=_right(name))
        is_returned = rest.startswith(RETURNED)
        try:
            words = VERBS[name].split(rest.removeprefix(RETURNED).strip())
        except ValueError as error:
            raise MagicUsageError(f"reading `%ddp {line}`", found=str(error), fix="Close the quotes") from error
        given = VERBS[name].parser().read(words)
        given |= {SCOPE: self._scope(local_ns), "is_returned": is_returned}
        return VERBS[name].run(self._desk, given)

    def _scope(self, local_ns: dict[str, Any] | None) -> dict[str, Any]:
        """Return the variables that the line can use: the notebook's, and in a function also its local variables."""
        names: dict[str, Any] = self._desk.shell.user_ns
        return names if local_ns is None or local_ns is names else {**names, **local_ns}


def overview() -> str:
    """Return the list of all verbs, one per line."""
    width = max(map(len, VERBS)) + 2
    verbs = "".join(f"  %ddp {name:{width}}{verb.does}\n" for name, verb in VERBS.items())
    return (
        f"{verbs}  %ddp VERB -h{'':{width - 7}}the options of a verb\n\n"
        "  %%ddp [--ranks 0,2-3] [--local | --everywhere] [--quiet] [--keep-cache]\n"
        "                run the cell below on the ranks\n"
    )


def _right(name: str) -> str:
    if name.startswith("-"):
        return f"Options without a verb are the cell magic's: write `%%ddp {name} ...` above the code"
    return did_you_mean(name, VERBS) or f"The verbs are {', '.join(VERBS)}; to run code, put it below `%%ddp`"
