# SPDX-License-Identifier: Apache-2.0
"""`MagicParser`: parses the lines of `%ddp` and `%%ddp`; errors show the correct usage."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args

from ddpilot.errors import DdpilotError, did_you_mean
from ddpilot.output.writer import Output
from ddpilot.session.options import SessionOptions
from ddpilot.watch.options import Action


class MagicUsageError(DdpilotError, ValueError):
    """A magic was used incorrectly."""

    def _render_traceback_(self) -> list[str]:
        """Return the message only, for IPython: the frames are ddpilot's own."""
        return [f"UsageError: {self.render()}"]


class HelpRequested(Exception):  # noqa: N818  # nothing is wrong
    """`-h` was given: carries the help text to show. Not an error."""


class MagicParser(argparse.ArgumentParser):
    """An argument parser that raises MagicUsageError instead of exiting, and `HelpRequested` for -h.

    `hint` returns a suggestion for an unknown word, or "" to show the usage.
    """

    def __init__(self, prog: str, *, hint: Callable[[str], str] | None = None, **kwargs: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=False, **kwargs)
        self._hint = hint
        self.add_argument("-h", "--help", action=_Help, help="show this")

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options in `words`, by name. Raises MagicUsageError, or HelpRequested."""
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
        raise HelpRequested(parser.format_help())


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


_FLAGS: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nproc_per_node": (("-n", "--nproc-per-node"), {"metavar": "N", "type": lambda n: int(n) if n.isdecimal() else n}),
    "gpus": (("--gpus",), {"metavar": "0,1", "type": parse_ranks}),
    "backend": (("--backend",), {}),
    "seed": (("--seed",), {"type": int}),
    "apps": (("--app",), {"metavar": "NAME", "action": "append"}),
    "env": (("--env",), {"metavar": "NAME=VALUE", "action": "append", "type": parse_variable}),
    "preload": (("--preload",), {"metavar": "MODULE", "action": "append"}),
    "respawn": (("--respawn",), {"action": "store_true"}),
    "keep_cache": (("--keep-cache",), {"action": "store_true"}),
    "verbose": (("--verbose",), {"action": "store_true"}),
    "output": (("--output",), {"choices": get_args(Output)}),
    "output_limit_bytes": (("--output-limit-bytes",), {"metavar": "BYTES", "type": int}),
    "watch": (("--no-watch",), {"action": "store_false"}),
    "guard": (("--no-guard",), {"action": "store_false"}),
    "on_finding": (("--on-finding",), {"choices": get_args(Action)}),
    "stall_warn_s": (("--stall-warn-s",), {"metavar": "S", "type": float}),
}
"""Flags and argparse arguments of each field. A test checks that every field of `SessionOptions` is present."""

_HELP: Mapping[str, str] = {
    "nproc_per_node": "number of ranks; auto: one for each visible GPU, else 1; gpu: one for each visible GPU; "
    "cpu: one for each core. Default: auto",
    "gpus": "numbers of the GPUs that the ranks may see, among those visible here; default: all",
    "backend": "backend of the process group: gloo, nccl or cpu:gloo,cuda:nccl; default: chosen by the device",
    "seed": "seed Python's random, torch and numpy with this number on every rank; default: no seed",
    "apps": "prepare a training library on every rank, such as fastai or lightning; may be repeated",
    "env": "environment variable of the ranks; may be repeated",
    "preload": "module that is imported once before the ranks are forked; may be repeated",
    "respawn": "restart a rank that died without waiting for %ddp restart",
    "keep_cache": "leave the GPU's memory cache as it is between cells; default: empty it after a failure or if large",
    "verbose": "print more about what apps change",
    "output": "labelled: all output with its rank in front; rank_zero: only that of rank 0; silent: none. Default: "
    "labelled",
    "output_limit_bytes": "bytes of each rank's output that a cell shows; default: 1 MB in a notebook, else no limit",
    "watch": "do not record collectives, and report neither hangs nor wrong numbers; default: do both",
    "guard": "do not look for training that runs with wrong numbers, such as gradients that differ; default: do",
    "on_finding": "report: show a finding and let the cell run; stop: end the cell at a finding that is an error. "
    "Default: report",
    "stall_warn_s": "seconds that ranks wait for one that is alive before a warning; default: 30",
}
"""Help text of each option, in terms of the command line; the docstrings of the fields describe Python values."""

_SHAPES: Mapping[str, Any] = {"apps": tuple, "env": dict, "preload": tuple}


def add_options(parser: MagicParser) -> None:
    """Add an option for every field to `parser`."""
    for name, (flags, how) in _FLAGS.items():
        parser.add_argument(*flags, dest=name, help=_HELP[name].replace("%", "%%"), **how)


def to_arguments(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Session` and `SessionOptions` that were given on the line."""
    names = {field.name for field in dataclasses.fields(SessionOptions)}
    return {name: _SHAPES.get(name, lambda same: same)(value) for name, value in parsed.items() if name in names}


def describe_options(options: SessionOptions) -> str:
    """Return the line that starts a session with `options`, leaving out defaults."""
    words = []
    for field in dataclasses.fields(SessionOptions):
        value, flag = getattr(options, field.name), _FLAGS[field.name][0][0]
        if value == getattr(SessionOptions(), field.name):
            continue
        if isinstance(value, bool):
            words.append(flag)
        elif field.name == "env":
            words += [f"{flag} {name}={text}" for name, text in value.items()]
        elif field.name == "gpus":
            words.append(f"{flag} {','.join(map(str, value))}")
        else:
            words += [f"{flag} {each}" for each in (value if isinstance(value, tuple) else (value,))]
    return " ".join(["%ddp start", *words])
