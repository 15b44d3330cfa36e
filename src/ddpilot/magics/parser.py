# SPDX-License-Identifier: Apache-2.0
"""`MagicParser`: parses the lines of `%ddp` and `%%ddp`; errors show the correct usage."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from ddpilot.errors import DdpilotError
from ddpilot.option_parser import OptionParser, add_nproc_option, add_watch_options, parse_int
from ddpilot.output.writer import Output
from ddpilot.session.options import SessionOptions


class MagicUsageError(DdpilotError, ValueError):
    """A magic was used incorrectly."""

    def _render_traceback_(self) -> list[str]:
        """Return the message only, for IPython: the frames are ddpilot's own."""
        return [f"UsageError: {self.render()}"]


class MagicParser(OptionParser):
    """The parser of a line of `%ddp` or `%%ddp`."""

    def refuse(self, argument: str | None, message: str) -> MagicUsageError:
        """Return the error for a wrong use, with the usage."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        found = f"argument {argument}: {message}" if argument else message
        return MagicUsageError(f"reading `{self.prog}`", found=found, fix=f"Usage: {usage}")

    def refuse_unknown(self, words: Sequence[str]) -> MagicUsageError:
        """Return the error for words that are not options, with a suggestion or the usage."""
        fix = self.suggest(words[0])
        if not fix:
            return self.refuse(None, f"unrecognized arguments: {' '.join(words)}")
        return MagicUsageError(f"reading `{self.prog}`", found=f"`{' '.join(words)}`", fix=fix)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks from text such as "0,2-3". Raises ArgumentTypeError, which argparse reports."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,2-3")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(ranks))


def parse_rank(text: str) -> int:
    """Parse the number of one rank. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a rank")
    return int(text)


def parse_variable(text: str) -> tuple[str, str]:
    """Parse the name and value in "NAME=value". Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=value")
    return name, value


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "gpus": {
        "metavar": "0,1",
        "type": parse_ranks,
        "help": "numbers of the GPUs that the ranks may see, among those visible here; default: all",
    },
    "backend": {"help": "backend of the process group: gloo, nccl or cpu:gloo,cuda:nccl; default: by device"},
    "seed": {"type": parse_int, "help": "seed Python's random, torch and numpy on every rank; default: no seed"},
    "app": {
        "dest": "apps",
        "metavar": "NAME",
        "action": "append",
        "help": "prepare a training library on every rank, such as fastai or lightning; may be repeated",
    },
    "env": {
        "metavar": "NAME=VALUE",
        "action": "append",
        "type": parse_variable,
        "help": "environment variable of the ranks; may be repeated",
    },
    "preload": {
        "metavar": "MODULE",
        "action": "append",
        "help": "module to import once before the ranks are forked; may be repeated",
    },
    "respawn": {"action": "store_true", "help": "restart a rank that died without waiting for %%ddp restart"},
    "keep-cache": {
        "action": "store_true",
        "help": "keep the GPU's memory cache between cells; default: empty it after a failure or if it is large",
    },
    "verbose": {"action": "store_true", "help": "print more about what apps change"},
    "output": {
        "choices": get_args(Output),
        "help": "labelled: all output, each line prefixed with its rank; rank_zero: that of rank 0 only; silent: none. "
        "Default: labelled",
    },
    "output-limit-bytes": {
        "metavar": "BYTES",
        "type": parse_int,
        "help": "bytes of each rank's output to show per cell; default: 1 MB in a notebook, else no limit",
    },
}
"""argparse arguments of the options that only sessions have. A test checks that every field has an option."""

_SHAPES: Mapping[str, Any] = {"apps": tuple, "env": dict, "preload": tuple}
_FLAGS = {"nproc_per_node": "-n", "apps": "--app", "watch": "--no-watch", "guard": "--no-guard"}
"""Flags of fields whose names differ."""


def add_options(parser: MagicParser) -> None:
    """Add an option for every field of `SessionOptions`."""
    add_nproc_option(parser)
    for name, how in _OPTIONS.items():
        parser.add_argument(f"--{name}", **how)
    add_watch_options(parser, default="report")


def to_arguments(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Session` and `SessionOptions` that were given on the line."""
    names = {field.name for field in dataclasses.fields(SessionOptions)}
    return {name: _SHAPES.get(name, lambda same: same)(value) for name, value in parsed.items() if name in names}


def describe_options(options: SessionOptions) -> str:
    """Return the line that starts a session with `options`, leaving out defaults."""
    words = []
    for field in dataclasses.fields(SessionOptions):
        value = getattr(options, field.name)
        flag = _FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
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
