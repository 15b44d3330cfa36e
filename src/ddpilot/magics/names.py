# SPDX-License-Identifier: Apache-2.0
"""`NameHints`: fixes for NameErrors on a rank for a name of the notebook, and the other way round."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from ddpilot.errors import LaunchError, RankError
from ddpilot.magics.shell_session import Desk
from ddpilot.session.protocol.variables import find_companions
from ddpilot.session.session import Session

_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")


class NameHints:
    """Adds a fix to NameErrors of ranks and of the notebook's cells if the other side has the name."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def advise(self, error: RankError | LaunchError) -> None:
        """Set the fix of `error` if a rank raised a NameError for a name that the notebook has."""
        missing = _MISSING.search(error.found)
        if missing is None or error.fix:
            return
        error.fix = self._fix(missing[1])
        error.args = (error.render(),)

    def _fix(self, name: str) -> str:
        shell = self._desk.shell
        if name not in shell.user_ns or name in shell.user_ns_hidden:
            return ""
        value = shell.user_ns[name]
        if isinstance(value, ModuleType):
            whole = f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
            return f"`{name}` is imported in the notebook: run `{whole}` in a `%%ddp` cell too"
        here = ", or run this cell in the notebook with `%%ddp --local`" if self._desk.is_auto else ""
        hidden = shell.user_ns_hidden
        visible = {each: other for each, other in shell.user_ns.items() if each not in hidden and each[0] != "_"}
        names = find_companions(name, {**visible, name: value})
        if names is None:
            return f"The notebook has `{name}` without the model that it trains: make both on the ranks"
        them = "it" if len(names) == 1 else "both" if len(names) == 2 else "all"
        return f"The notebook has `{name}`: `%ddp push {' '.join(names)}` copies {them} to the ranks{here}"

    def after_cell(self, result: Any) -> None:
        """Callback for IPython's "post_run_cell": print a hint if the cell lacked a name that the ranks have."""
        error, session = result.error_in_exec, self._desk.session
        name = getattr(error, "name", None) if isinstance(error, NameError) else None
        if session is not None and name and name not in self._desk.shell.user_ns and is_on_a_rank(name, session):
            self._desk.say(f"`{name}` is on the ranks: use it in a `%%ddp` cell, or copy it with `%ddp pull {name}`")


def is_on_a_rank(name: str, session: Session) -> bool:
    """True if the lowest live rank has a variable `name`; also False if the ranks are busy."""
    try:
        return any(session.pull(f"{name!r} in globals()", rank=rank) for rank in sorted(session.pids())[:1])
    except (LaunchError, RankError):  # for example, the ranks are busy
        return False
