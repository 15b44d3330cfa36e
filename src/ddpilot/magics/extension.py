# SPDX-License-Identifier: Apache-2.0
"""`%load_ext ddpilot` and `%unload_ext ddpilot`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.magics.completion import inspect_on_ranks, make_matcher
from ddpilot.magics.input_transformer import CellTransformer
from ddpilot.magics.magic import DdpMagics
from ddpilot.magics.push_pull import MarkReturned, NameHints
from ddpilot.magics.shell_session import ShellSession, count_ranks
from ddpilot.session.arguments import check_installed

_ATTRIBUTE = "_ddpilot_parts"


class _Parts:
    """What the extension adds to a shell. It is kept by `%reload_ext`, and so are the ranks."""

    def __init__(self, shell: Any) -> None:
        self.shell_session = ShellSession(shell)
        self.router = CellTransformer(self.shell_session)
        self.matcher = make_matcher(self.shell_session)
        self.hints = NameHints(self.shell_session)
        self.marks = MarkReturned()
        self.shell_session.advise = self.hints.advise
        self.undo_inspect: Callable[[], None] = lambda: None
        self.is_loaded = False


def load_ipython_extension(shell: Any) -> None:
    """Add `%ddp` and `%%ddp` to an IPython shell. A second call has no effect."""
    parts = getattr(shell, _ATTRIBUTE, None) or _Parts(shell)
    setattr(shell, _ATTRIBUTE, parts)
    if parts.is_loaded:
        return
    shell.register_magics(DdpMagics(parts.shell_session))
    shell.input_transformers_cleanup.append(parts.router)
    shell.Completer.custom_matchers.append(parts.matcher)
    shell.ast_transformers.append(parts.marks)
    parts.undo_inspect = inspect_on_ranks(parts.shell_session)
    shell.events.register("post_run_cell", parts.hints.after_cell)
    parts.is_loaded = True
    if not parts.shell_session.is_terminal and parts.shell_session.session is None:
        threading.Thread(target=_warm_up, name="ddpilot-warm-up", daemon=True).start()
    if parts.shell_session.is_auto:
        parts.shell_session.report("auto is still on")


def _warm_up() -> None:
    """Make the rank server import torch in the background."""
    with contextlib.suppress(LaunchError, ImportError):  # `%ddp start` raises the same error
        check_installed()
        from ddpilot.session.kernels.processes import warm_up  # needs the packages that `check_installed` looks for

        warm_up()


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics.

    Ranks continue to run until the notebook's kernel ends; `%load_ext ddpilot` makes them available again.
    """
    parts = getattr(shell, _ATTRIBUTE, None)
    if parts is None or not parts.is_loaded:
        return
    for magics in shell.magics_manager.magics.values():
        for name in [name for name, magic in magics.items() if isinstance(getattr(magic, "__self__", None), DdpMagics)]:
            del magics[name]
    shell.input_transformers_cleanup.remove(parts.router)
    shell.Completer.custom_matchers.remove(parts.matcher)
    parts.undo_inspect()
    if parts.marks in shell.ast_transformers:  # IPython removes transformers that have raised
        shell.ast_transformers.remove(parts.marks)
    shell.events.unregister("post_run_cell", parts.hints.after_cell)
    parts.is_loaded = False
    if parts.shell_session.session is not None:
        parts.shell_session.report(
            f"{count_ranks(parts.shell_session.session)} left running; `%load_ext ddpilot` makes them available again"
        )
