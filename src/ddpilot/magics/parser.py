# SPDX-License-Identifier: Apache-2.0
"""Parse `%ddp` and `%%ddp`: verbs, options and their values; errors show the correct usage."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
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


def parse_name(text: str) -> str:
    """Parse the name of a variable; "" if the option has none. Raises ArgumentTypeError."""
    if text and (not text.isidentifier() or iskeyword(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a variable")
    return text


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse names of machines from text such as "a,b"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_slurm_option(text: str) -> tuple[str, str]:
    """Parse the name and value in "time=2:00:00", or the name of an option without a value."""
    name, _, value = text.partition("=")
    return name.lstrip("-"), value


def parse_variable(text: str) -> tuple[str, str]:
    """Parse the name and value in "NAME=value". Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=value")
    return name, value


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "hosts": {
        "metavar": "A,B",
        "type": parse_hosts,
        "help": "run the ranks on these machines, which ssh reaches without a password; default: on this one",
    },
    "slurm": {
        "action": "store_true",
        "help": "run the ranks on nodes of this Slurm job, or ask Slurm for nodes",
    },
    "nodes": {
        "metavar": "N",
        "type": parse_int,
        "help": "with --slurm: number of nodes; default: all of this job, or 1",
    },
    "gpus-per-node": {
        "metavar": "N",
        "type": parse_int,
        "help": "with --slurm: GPUs to ask for on each node, each for one rank unless -n is given",
    },
    "slurm-option": {
        "dest": "slurm_options",
        "metavar": "NAME=VALUE",
        "action": "append",
        "type": parse_slurm_option,
        "help": "with --slurm: an option of salloc, such as time=2:00:00; may be repeated",
    },
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

_SHAPES: Mapping[str, Any] = {"apps": tuple, "env": dict, "preload": tuple, "slurm_options": dict}
_FLAGS = {
    "nproc_per_node": "-n",
    "apps": "--app",
    "slurm_options": "--slurm-option",
    "watch": "--no-watch",
    "guard": "--no-guard",
}
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
        elif isinstance(value, Mapping):
            words += [f"{flag} {name}={text}" if text else f"{flag} {name}" for name, text in value.items()]
        elif field.name in ("gpus", "hosts"):
            words.append(f"{flag} {','.join(map(str, value))}")
        else:
            words += [f"{flag} {each}" for each in (value if isinstance(value, tuple) else (value,))]
    return " ".join(["%ddp start", *words])


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb of `%ddp`: its description and its options."""

    name: str
    does: str
    add: Callable[[MagicParser], None] = lambda parser: None
    split: Callable[[str], list[str]] = shlex.split
    """Splits the text after the verb into words."""
    hint: Callable[[str], str] | None = None
    """Returns a suggestion for a word that the verb does not know, or ""."""

    def parser(self) -> MagicParser:
        """Return the parser of the verb's arguments."""
        parser = MagicParser(f"%ddp {self.name}", hint=self.hint, description=f"{self.does[0].upper()}{self.does[1:]}.")
        self.add(parser)
        return parser


def _hint_start(word: str) -> str:
    number = word.removeprefix("n").removeprefix("=")
    if number.isdecimal():
        return f"Did you mean `%ddp start -n {number}`?"
    if word in ("--rank", "--ranks"):
        return "All ranks are started; `-n 2` sets their number, and `%%ddp --ranks 0` runs a cell on some of them"
    return ""


def _hint_restart(word: str) -> str:
    if word == "--all":
        return "`%ddp restart` without numbers restarts all ranks"
    return "Give the numbers without an option, as in `%ddp restart 0 1`" if word in ("--rank", "--ranks") else ""


def _add_some_ranks(parser: MagicParser) -> None:
    parser.add_argument("ranks", metavar="RANK", nargs="*", type=parse_rank, help="only these ranks; default: all")


def _add_status(parser: MagicParser) -> None:
    """Add the options of `%ddp status`."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--live", action="store_true", help="update the board every second until the ranks are stopped")
    how.add_argument("--stop", action="store_true", help="stop updating it")


def _add_auto(parser: MagicParser) -> None:
    parser.add_argument("state", nargs="?", choices=("on", "off"), default=None, help="default: show the current state")


def _add_push(parser: MagicParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the notebook")
    parser.add_argument("--ranks", metavar="0,2-3", type=parse_ranks, help="to these ranks; default: all live ranks")


def _add_pull(parser: MagicParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="variables of the ranks, or an expression with --as")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", metavar="R", type=parse_rank, help="from this rank; default: 0")
    which.add_argument("--all", action="store_true", help="from all ranks: a list with each one's value, by rank")
    parser.add_argument("--as", dest="other", metavar="OTHER", help="the variable's name in the notebook")


def _add_doctor(parser: MagicParser) -> None:
    parser.add_argument(
        "call",
        metavar="FUNCTION",
        nargs="*",
        help="check this function, a call such as train(epochs=1), or a script, step by step; default: the machine",
    )
    parser.add_argument(
        "--updates", dest="num_updates", metavar="N", type=parse_rank, help="optimizer steps; default: 5"
    )
    parser.add_argument(
        "-n", "--nproc-per-node", metavar="N", type=parse_rank, help="ranks; default: one per GPU, else 2"
    )
    parser.add_argument(
        "--workers", dest="num_workers", metavar="N", type=parse_rank, help="DataLoader workers per rank"
    )
    parser.add_argument("--checkpoint-dir", metavar="PATH", help="folder in which checkpoints will be kept; default: .")
    parser.add_argument("--no-live", dest="live", action="store_false", help="do not start ranks")


def _add_verify(parser: MagicParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="a function of the notebook or of the ranks, or a call: train(epochs=1)"
    )
    parser.add_argument(
        "-n", "--nproc-per-node", metavar="N", type=parse_rank, help="ranks to compare with one; default: one per GPU"
    )
    parser.add_argument(
        "--updates", dest="num_updates", metavar="K", type=parse_rank, help="optimizer steps to compare; default: 5"
    )
    parser.add_argument(
        "--timeout-s", metavar="S", type=parse_int, help="seconds after which a run is ended; default: 600"
    )


def _split_call(text: str) -> list[str]:
    """Split a line into words; a call such as ``train("a b", epochs=1)`` is one word."""
    call = re.search(r"[A-Za-z_][\w.]*\(.*\)", text)
    if call is None:
        return shlex.split(text)
    return [*shlex.split(text[: call.start()]), call[0], *shlex.split(text[call.end() :])]


def _add_run(parser: MagicParser) -> None:
    parser.add_argument("call", metavar="CALL", nargs="+", help="a call, such as train(model, epochs=3)")


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("start", "start the ranks, which keep running until they are stopped", add_options, hint=_hint_start),
        Verb("stop", "stop the ranks; their variables are lost"),
        Verb(
            "restart",
            "restart ranks under the same numbers; their variables are lost",
            _add_some_ranks,
            hint=_hint_restart,
        ),
        Verb(
            "run",
            "call a function of the notebook on every rank; the results come back by rank",
            _add_run,
            lambda text: [text] if text and not text.startswith("-") else text.split(),
        ),
        Verb("push", "copy variables of the notebook to the ranks", _add_push),
        Verb("pull", "copy variables of the ranks to the notebook", _add_pull, str.split),
        Verb("status", "show the state, memory and pid of every rank", _add_status),
        Verb("auto", "run plain cells on the ranks (on) or in the notebook (off)", _add_auto),
        Verb("stacks", "show the Python stack of each rank", _add_some_ranks),
        Verb(
            "doctor",
            "check this machine, or a function of the notebook, with ranks of its own",
            _add_doctor,
            _split_call,
        ),
        Verb(
            "verify", "compare what a function computes on one rank and on several of its own", _add_verify, _split_call
        ),
        Verb("interrupt", "interrupt the cell that a different thread runs on the ranks"),
    )
}


def overview() -> str:
    """Return the list of all verbs, one per line."""
    width = max(map(len, VERBS)) + 2
    verbs = "".join(f"  %ddp {name:{width}}{verb.does}\n" for name, verb in VERBS.items())
    return (
        f"{verbs}  %ddp VERB -h{'':{width - 7}}the options of a verb\n\n"
        "  %%ddp [--ranks 0,2-3] [--local | --everywhere] [--quiet] [--keep-cache] [--profile [NAME]]\n"
        "                run the cell below on the ranks\n"
    )


def make_cell_parser() -> MagicParser:
    """Return the parser of the options of `%%ddp`."""
    parser = MagicParser("%%ddp", description="Run the cell below on the ranks.")
    parser.add_argument("--ranks", metavar="0,2-3", type=parse_ranks, help="on these ranks; default: all live ranks")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="in the notebook alone, also while auto is on")
    place.add_argument("--everywhere", action="store_true", help="on the ranks and then in the notebook")
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--keep-cache", action="store_true", help="leave the GPU's memory cache as it is afterwards")
    parser.add_argument(
        "--profile",
        metavar="NAME",
        nargs="?",
        const="",
        type=parse_name,
        help="show where the time of the cell's updates goes; NAME: a variable of the notebook for the result",
    )
    return parser
