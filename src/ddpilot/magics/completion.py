# SPDX-License-Identifier: Apache-2.0
"""Tab completion and Shift-Tab: variables of the ranks in their cells, and verbs and arguments after `%ddp`."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

from ddpilot.magics.parser import VERBS, make_cell_parser
from ddpilot.magics.shell_session import ShellSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from IPython.core.completer import CompletionContext

    from ddpilot.session.session import Session

_LINE = re.compile(r"\s*(?:[\w.,\[\] ]+=\s*)?%ddp (?P<words>.*)")
"""A line of `%ddp`, also as the right side of an assignment."""

_NAME = re.compile(r"[^\W\d]\w*$")


def make_matcher(shell_session: ShellSession) -> Callable[[CompletionContext], dict[str, Any]]:
    """Create a matcher for IPython's completer. It asks one idle rank and waits at most 0.3 s."""

    def match(context: CompletionContext) -> dict[str, Any]:
        line = context.text_until_cursor
        typed = _LINE.fullmatch(line)
        if typed is not None:
            return _complete_line(shell_session, typed["words"])
        if context.cursor_line == 0 and line.startswith("%%ddp"):
            return _words(line, make_cell_parser().flags)
        return _complete_code(shell_session, context)

    mark: Any = context_matcher(identifier="ddpilot")
    marked: Callable[[CompletionContext], dict[str, Any]] = mark(match)
    return marked


def _complete_code(shell_session: ShellSession, context: CompletionContext) -> dict[str, Any]:
    above = [f"{line}\n" for line in context.full_text.split("\n")[: context.cursor_line]]
    found = _find_code(shell_session, context.full_text, len("".join(above)) + context.cursor_position)
    if found is None:
        return {"completions": []}
    session, code, cursor = found
    return _from_rank(session, code, cursor)


def _find_code(shell_session: ShellSession, text: str, cursor: int) -> tuple[Session, str, int] | None:
    """Return the session, the code and the cursor's position in it if the cell `text` runs on the ranks; else None."""
    first, newline, body = text.partition("\n")
    session = shell_session.session
    if session is None:
        return None
    if first.startswith("%%ddp") and "--local" not in first:
        num_chars = len(first + newline)
        return (session, body, cursor - num_chars) if cursor >= num_chars else None
    return (session, text, cursor) if shell_session.takes_cells and not first.startswith("%") else None


def _from_rank(session: Session, code: str, cursor: int) -> dict[str, Any]:
    matches, start, end = session.complete(code, cursor)
    return {
        "completions": [SimpleCompletion(text=match, type="ranks") for match in matches],
        "matched_fragment": code[start:end],
        "suppress": bool(matches),
    }


def _complete_line(shell_session: ShellSession, words: str) -> dict[str, Any]:
    """Complete a verb, or its options, ranks, or names of variables in the notebook or on the ranks."""
    name, blank, rest = words.partition(" ")
    verb, prefix, session = VERBS.get(name), rest.rpartition(" ")[2], shell_session.session
    if not blank:
        return _words(words, VERBS)
    if verb is None:
        return {"completions": []}
    if prefix.startswith("-"):
        return _words(rest, verb.parser().flags)
    if name == "pull" and session is not None and not rest.endswith("--as "):
        return _from_rank(session, prefix, len(prefix))
    if name in ("restart", "stacks") and session is not None:
        return _words(rest, map(str, range(session.world_size)))
    if name == "auto":
        return _words(rest, ("on", "off"))
    if name in ("push", "run", "verify"):
        return _notebook_names(shell_session, prefix)
    return {"completions": []}


def _notebook_names(shell_session: ShellSession, prefix: str) -> dict[str, Any]:
    """Complete names of variables of the notebook. Attributes are left to other matchers."""
    name = _NAME.search(prefix)
    name_prefix = name[0] if name else ""
    if prefix[: len(prefix) - len(name_prefix)].endswith("."):
        return {"completions": []}
    shell = shell_session.shell
    known = sorted(each for each in shell.user_ns if each not in shell.user_ns_hidden and not each.startswith("_"))
    return _words(name_prefix, known)


def _words(line: str, known: Iterable[str]) -> dict[str, Any]:
    prefix = line.rpartition(" ")[2]
    found = [SimpleCompletion(text=word, type="magic") for word in known if word.startswith(prefix)]
    return {"completions": found, "matched_fragment": prefix, "suppress": bool(found)}


def inspect_on_ranks(shell_session: ShellSession) -> Callable[[], None]:
    """Make Shift-Tab show objects of the ranks in their cells, else of the notebook.

    Return a function that undoes this.
    """
    kernel = getattr(shell_session.shell, "kernel", None)
    if kernel is None:
        return lambda: None
    original = kernel.do_inspect

    @functools.wraps(original)
    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **kwargs: Any) -> Any:
        found = _find_code(shell_session, code, cursor_pos)
        if found is not None:
            session, on_ranks, cursor = found
            data = session.inspect(on_ranks, cursor, detail_level=detail_level)
            if data:
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        return original(code, cursor_pos, detail_level, *args, **kwargs)

    kernel.do_inspect = do_inspect
    return lambda: vars(kernel).pop("do_inspect", None)
