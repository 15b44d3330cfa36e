# SPDX-License-Identifier: Apache-2.0
"""Tab completion: the ranks' variables in their cells, verbs behind `%ddp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

from ddpilot.magics.cells import make_cell_parser
from ddpilot.magics.desk import Desk
from ddpilot.magics.verbs import VERBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from IPython.core.completer import CompletionContext


def make_matcher(desk: Desk) -> Callable[[CompletionContext], dict[str, Any]]:
    """A matcher for IPython's completer. It asks one rank that has nothing to do, and waits 0.3 s at most."""

    def match(context: CompletionContext) -> dict[str, Any]:
        line = context.text_until_cursor
        if line.startswith("%ddp "):
            return _words(line, VERBS if line.count(" ") == 1 else _flags(line))
        if context.cursor_line == 0 and line.startswith("%%ddp"):
            return _words(line, _options(make_cell_parser()))
        first, _, body = context.full_text.partition("\n")
        is_ours = first.startswith("%%ddp") and "--local" not in first
        is_plain = desk.takes_cells and not first.startswith("%")
        session = desk.session
        if session is None or not (is_ours or is_plain):
            return {"completions": []}
        code = body if is_ours else context.full_text
        above = context.full_text.split("\n")[is_ours : context.cursor_line]
        cursor = sum(len(each) + 1 for each in above) + context.cursor_position
        matches, start, end = session.complete(code, cursor)
        return {
            "completions": [SimpleCompletion(text=match, type="ranks") for match in matches],
            "matched_fragment": code[start:end],
            "suppress": bool(matches),
        }

    mark: Any = context_matcher(identifier="ddpilot")
    marked: Callable[[CompletionContext], dict[str, Any]] = mark(match)
    return marked


def _words(line: str, known: Iterable[str]) -> dict[str, Any]:
    begun = line.rpartition(" ")[2]
    found = [SimpleCompletion(text=word, type="magic") for word in known if word.startswith(begun)]
    return {"completions": found, "matched_fragment": begun, "suppress": bool(found)}


def _flags(line: str) -> list[str]:
    verb = VERBS.get(line.split()[1])
    return _options(verb.parser()) if verb is not None and line.rpartition(" ")[2].startswith("-") else []


def _options(parser: object) -> list[str]:
    actions = getattr(parser, "_actions", ())
    return [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
