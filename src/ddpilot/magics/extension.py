# SPDX-License-Identifier: Apache-2.0
"""`%load_ext ddpilot` and `%unload_ext ddpilot`, and the input transformer that decides where a cell runs."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

from ddpilot.errors import LaunchError
from ddpilot.magics.completion import inspect_on_ranks, make_matcher
from ddpilot.magics.magic import ABOVE, WHOLE, DdpMagics
from ddpilot.magics.push_pull import MarkReturned, NameHints
from ddpilot.magics.shell_session import ShellSession, count_ranks
from ddpilot.session.arguments import check_installed

_NO_VERB = re.compile(r"%ddp[ \t]*((?!-h\b|--help\b)--?\w.*)?\n?$")
"""`%ddp` without a verb, which lists the verbs if no code follows."""

_PLACEMENT = re.compile(r"%%ddp[ \t]+--(local|everywhere)[ \t]*\n?$")
_VERB = re.compile(r"(?:[\w, ]+=\s*)?%ddp(?:\s|$)|%(?:re|un)?load_ext\s+ddpilot\s*$")
_INDENTED = re.compile(r"[ \t]+%%ddp(?:\s|$)")
"""An indented first line above code that is indented less: IPython has removed the common indentation."""

_MAGIC = re.compile(r"%(\w+)")

EVERYWHERE = frozenset(
    {"aimport", "autoreload", "cd", "colors", "config", "env", "load_ext", "matplotlib", "precision", "pylab"}
    | {"pdb", "reload_ext", "set_env", "unload_ext", "xmode"}
)
"""Line magics that configure a shell; they run in the notebook and on all ranks, to keep these alike."""

HERE = frozenset({"pip", "conda", "mamba", "micromamba", "uv", "history", "lsmagic", "magic", "quickref", "notebook"})
"""Line magics about the environment or the notebook; they run in the notebook only."""


class CellTransformer:
    """A cell transformer that runs before those that look for magics."""

    # Makes IPython skip it when checking whether a cell is complete, so that the code is checked as typed.
    has_side_effects = True

    def __init__(self, shell_session: ShellSession) -> None:
        self._shell_session = shell_session

    def __call__(self, lines: list[str]) -> list[str]:
        if lines and _INDENTED.match(lines[0]):
            lines = [lines[0].lstrip(), *lines[1:]]
        no_verb = _NO_VERB.match(lines[0]) if lines else None
        if no_verb and _has_code(lines[1:]):
            line = " ".join([ABOVE, *(no_verb[1] or "").split()])
            return [f"get_ipython().run_line_magic('ddp', {line!r})\n"]
        placement = _PLACEMENT.match(lines[0]) if lines else None
        if placement:
            return self._place(placement[1], lines)
        if not self._shell_session.takes_cells or not _has_code(lines) or lines[0].startswith("%%"):
            return lines
        if self._shell_session.is_terminal and "".join(lines).strip() in ("exit", "exit()", "quit", "quit()"):
            return lines
        magics = _only_magics(lines)
        if magics and magics <= HERE:
            return lines
        if magics and magics <= EVERYWHERE:
            return [*_ended(lines), _to_ranks("".join(lines))]
        return _split(lines)

    def _place(self, where: str, lines: list[str]) -> list[str]:
        """Turn `%%ddp --local` and `--everywhere` into plain notebook code, which IPython runs like any other."""
        body = lines[1:]
        if not _has_code(body) or "".join(body).lstrip().startswith("%%"):
            return lines  # the magic reports what is missing, or runs the magic below it
        comment = f"# {lines[0]}"
        if where == "local":
            return [comment, *body]
        return [_to_ranks("".join([comment, *body])), *body]


def _has_code(lines: list[str]) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def _only_magics(lines: list[str]) -> frozenset[str]:
    """Return the names of the line magics in a cell, "pip" for shell commands; empty if the cell has other code."""
    names = set()
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        magic = _MAGIC.match(line)
        if line.startswith("!"):
            names.add("pip")  # run once on this machine, not on every rank
        elif magic is None or _VERB.match(line):
            return frozenset()
        else:
            names.add(magic[1])
    return frozenset(names)


def _split(lines: list[str]) -> list[str]:
    """Keep the `%ddp` lines of a cell in the notebook and send the other lines to the ranks, in the same order."""
    made: list[str] = []
    code: list[str] = []
    for number, line in enumerate(lines):
        magic = _MAGIC.match(line)
        if not _VERB.match(line) and not (magic and magic[1] in HERE):
            if not code:
                code = [f"# {above}" for above in _ended(lines[:number])]
            code.append(line)
            continue
        if _has_code(code):
            made.append(_to_ranks("".join(code)))
        code = []
        made += _ended([line])
    return [*made, _to_ranks("".join(code))] if _has_code(code) else made


def _to_ranks(code: str) -> str:
    return f"get_ipython().run_cell_magic('ddp', {WHOLE!r}, {code!r})\n"


def _ended(lines: list[str]) -> list[str]:
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]


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
