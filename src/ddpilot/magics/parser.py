# SPDX-License-Identifier: Apache-2.0
"""`MagicParser`: parses the lines of `%ddp` and `%%ddp`; errors show the correct usage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ddpilot.errors import DdpilotError, did_you_mean


class MagicUsageError(DdpilotError, ValueError):
    """A magic was used incorrectly."""

    def _render_traceback_(self) -> list[str]:
        """Return the message only, for IPython: the frames are ddpilot's own."""
        return [f"UsageError: {self.render()}"]


class Helped(Exception):  # noqa: N818  # nothing is wrong
    """`-h` was given: carries the help text to show. Not an error."""


class MagicParser(argparse.ArgumentParser):
    """An argument parser that raises MagicUsageError instead of exiting, and `Helped` for -h.

    `hint` returns a suggestion for an unknown word, or "" to show the usage.
    """

    def __init__(self, prog: str, *, hint: Callable[[str], str] | None = None, **kwargs: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=False, **kwargs)
        self._hint = hint
        self.add_argument("-h", "--help", action=_Help, help="show this")

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options in `words`, by name. Raises MagicUsageError, or Helped."""
        known, unknown = self.parse_known_args(words)
        if unknown:
            fix = self._hint(unknown[0]) if self._hint is not None else ""
            fix = fix or did_you_mean(unknown[0], (flag for action in self._actions for flag in action.option_strings))
            if not fix:
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
            raise MagicUsageError(f"reading `{self.prog}`", found=f"`{' '.join(unknown)}`", fix=fix)
        return vars(known)

    def error(self, message: str) -> NoReturn:
        """Raise MagicUsageError with `message` and the usage."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise MagicUsageError(f"reading `{self.prog}`", found=message, fix=f"Right is: {usage}")


class _Help(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Helped(parser.format_help())


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks from text such as "0,2-3". Raises ArgumentTypeError, which argparse reports."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 0,2-3")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(ranks))


def parse_rank(text: str) -> int:
    """Parse the number of one rank. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a rank")
    return int(text)


def parse_variable(text: str) -> tuple[str, str]:
    """Parse the name and value in "NAME=value". Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=value")
    return name, value
