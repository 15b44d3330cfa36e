# SPDX-License-Identifier: Apache-2.0
"""`OptionParser`: parses the options of `ddpilot run` and of the magics. Options of both are declared here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

from ddpilot.errors import DdpilotError, did_you_mean
from ddpilot.launching.options import OTHER_NAMES
from ddpilot.watch.options import Action


class HelpRequested(Exception):  # noqa: N818  # nothing is wrong
    """`-h` was given: carries the help text to show. Not an error."""


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises DdpilotError instead of exiting, and `HelpRequested` for -h.

    Options that are not given are left out of the result. `hint` returns a suggestion for an unknown word, or "".
    """

    def __init__(self, prog: str, *, hint: Callable[[str], str] | None = None, **kwargs: Any) -> None:
        super().__init__(
            prog=prog,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            add_help=False,
            exit_on_error=False,
            **kwargs,
        )
        self._hint = hint
        self.add_argument("-h", "--help", action=_Help, help="show this help")

    @property
    def flags(self) -> list[str]:
        """The long forms of all options."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options in `words`, by name. Raises DdpilotError, or HelpRequested."""
        try:
            known, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise self.refuse(error.argument_name, error.message) from error
        if unknown:
            raise self.refuse_unknown(unknown)
        return vars(known)

    def error(self, message: str) -> NoReturn:
        """Called by argparse if a positional argument is missing."""
        raise self.refuse(None, message)

    def suggest(self, word: str) -> str:
        """Return a suggestion for a word that is not an option, or ""."""
        if self._hint is not None and (hint := self._hint(word)):
            return hint
        typed = word.partition("=")[0]
        meant = OTHER_NAMES.get(typed.lstrip("-").replace("-", "_"))
        flags = [action.option_strings[-1] for action in self._actions if action.dest == meant]
        return did_you_mean(flags[0] if flags else typed, self.flags, show=self._show)

    def _show(self, flag: str) -> str:
        return f"`{'/'.join(self._option_string_actions[flag].option_strings)}`"

    def refuse(self, argument: str | None, message: str) -> DdpilotError:
        """Return the error for `message` of argparse about `argument`, such as "-n/--nproc-per-node"."""
        raise NotImplementedError

    def refuse_unknown(self, words: Sequence[str]) -> DdpilotError:
        """Return the error for `words` that are not options."""
        raise NotImplementedError


class _Help(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise HelpRequested(parser.format_help())


def add_watch_options(parser: OptionParser, *, default: Action, group: Any = None) -> None:
    """Add the options of `WatchOptions`.

    `default`: the default of `on_finding`, for the help; `group`: an argument group of `parser` for `--no-watch`.
    """
    (group or parser).add_argument(
        "--no-watch",
        dest="watch",
        action="store_false",
        help="do not record collectives, and detect neither hangs nor wrong numbers",
    )
    parser.add_argument(
        "--no-guard",
        dest="guard",
        action="store_false",
        help="do not check for training that continues with wrong numbers, such as gradients that differ",
    )
    parser.add_argument(
        "--on-finding",
        choices=get_args(Action),
        help=f"report: show findings and continue; stop: an error ends the job, or the cell ({default})",
    )
    parser.add_argument(
        "--stall-warn",
        "--stall-warn-s",
        dest="stall_warn_s",
        metavar="S",
        type=parse_seconds,
        help="seconds that ranks may wait for a live rank before a warning (30)",
    )


def add_nproc_option(parser: OptionParser) -> None:
    """Add `-n`, the number of ranks."""
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        metavar="N",
        type=parse_count,
        help="ranks on this node: a number, auto (one per GPU, else 1), gpu or cpu (one per core) (auto)",
    )


def parse_count(text: str) -> int | str:
    """Parse a number of ranks; other words are checked by the options class."""
    return int(text) if text.isdecimal() else text


def parse_seconds(text: str) -> float:
    """Parse a number of seconds. Raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def parse_int(text: str) -> int:
    """Parse a whole number. Raises ArgumentTypeError."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
