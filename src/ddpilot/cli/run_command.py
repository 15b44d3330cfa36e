# SPDX-License-Identifier: Apache-2.0
"""``ddpilot run``: turn command line words into options, run the script, and return an exit status.

If an option comes first, torchrun's rule applies: everything after the script belongs to the script. If the script
comes first, the words up to `--` are ddpilot's options and the words after it belong to the script.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpilot.errors import DdpilotError, LaunchError, RankError, WatchError, did_you_mean
from ddpilot.guard.hook import GUARD_VARIABLE
from ddpilot.launching.elastic.options import (
    DEFAULT_SIGNALS,
    OutputClosedError,
    RunOptions,
    RunStoppedError,
    check_signals,
)
from ddpilot.launching.elastic.run import run_prepared
from ddpilot.launching.elastic.target import LAUNCHERS, prepare_run
from ddpilot.option_parser import (
    HelpRequested,
    OptionParser,
    add_nproc_option,
    add_watch_options,
    parse_int,
    parse_seconds,
)
from ddpilot.watch.companion import Watcher
from ddpilot.watch.external.instrumentation import ACTION_VARIABLE, WATCH_VARIABLE
from ddpilot.watch.options import WatchOptions

FAILED_STATUS = 1
_DID = "reading the options of `ddpilot run`"
_OFF = ("", "0", "false", "no", "off")

_USAGE = """\
ddpilot run [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]...
       ddpilot run SCRIPT [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]..."""

_DESCRIPTION = """\
Run a script on several ranks, as torchrun does, and report which rank failed first.

  ddpilot run train.py -n 4 -- --epochs 3
  ddpilot run --nproc-per-node 4 train.py --epochs 3
  ddpilot run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -n 4 train.py

Options are written with - or _, with = or a blank. torchrun's PET_... variables are read too."""

_STARTERS = ("python", "python3", "torchrun", *LAUNCHERS)
_REFUSED = {
    "start-method": "scripts always start as fresh interpreters, under torchrun too: leave it out",
    "run-path": "the script runs as plain Python runs it: leave it out",
    "event-log-handler": "ddpilot logs no events of torch's: leave it out, or use torchrun",
    "logs-specs": "ddpilot shows and writes the output itself: use --log-dir, --redirects, --tee",
    "duplicate-stdout-filters": "ddpilot does not filter lines: pipe the output through grep, or use --log-dir",
    "duplicate-stderr-filters": "ddpilot does not filter lines: pipe the output through grep, or use --log-dir",
    "numa-binding": "ddpilot binds no cores: start it under numactl, or use torchrun",
    "virtual-local-rank": "every rank sees every GPU and uses number LOCAL_RANK: leave it out, or use torchrun",
    "use-env": "it is torch.distributed.launch's; LOCAL_RANK is always in the environment: leave it out",
    "local-rank": "it is torch.distributed.launch's; the script reads os.environ['LOCAL_RANK']: leave it out",
    "nproc": "the option is --nproc-per-node, or -n",
    "num-processes": "the option is --nproc-per-node, or -n",
    "nodes": "the option is --nnodes",
    "num-machines": "the option is --nnodes",
    "machine-rank": "the option is --node-rank",
    "main-process-ip": "the option is --master-addr",
    "main-process-port": "the option is --master-port",
    "host": "the option is --master-addr",
    "port": "the option is --master-port",
}


def run_words(words: Sequence[str], show: Callable[[DdpilotError], str], environ: Mapping[str, str]) -> int:
    """Execute ``ddpilot run`` with these words. Returns the exit status as torchrun does: 0, or 1 for a failure;
    75 if every rank of this node exited with 75 to be requeued.

    `show`: formats an error as text. Raises DdpilotError if the words, the script or this node are invalid, before
    any rank starts.
    """
    if not words:
        print(make_parser().format_help(), end="")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # ranks may print characters that this stream cannot encode
    try:
        options, watching = read_options(split_words(words), environ)
    except HelpRequested as helped:
        print(helped, end="")
        return 0
    prepared = prepare_run(options, environ)
    is_python = prepared.options.kind != "program"
    if watching.watch and not is_python:  # the program may start Python, once or several times
        prepared = replace(prepared, variables={**prepared.variables, **watched_variables(watching, environ)})
    try:
        run_prepared(prepared, functools.partial(Watcher, watching) if watching.watch and is_python else None)
    except OutputClosedError as error:
        return error.exitcode
    except RunStoppedError as error:
        print(f"ddpilot: {error.found}", file=sys.stderr)
        return error.exitcode
    except (WatchError, RankError) as error:
        print(f"ddpilot: {error}", file=sys.stderr)
        return FAILED_STATUS
    except DdpilotError as error:
        print(show(error), file=sys.stderr)
        return FAILED_STATUS
    finally:
        _flush_streams()
    return 0


def _flush_streams() -> None:
    """Flush the streams and redirect a broken pipe to /dev/null; Python would print a traceback for it at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the caller closed it
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except OSError:  # such as a full disk, which Python reports at exit
            continue


def read_options(words: Words, environ: Mapping[str, str]) -> tuple[RunOptions, WatchOptions]:
    """Build the options from `words` and torchrun's PET_ variables in `environ`. Raises LaunchError if invalid."""
    parser = make_parser()
    given = parser.read([*_words_from_environ(parser, environ), *words.options])
    watching = {name: given.pop(name) for name in ("watch", "guard", "on_finding", "stall_warn_s") if name in given}
    if words.script is None:
        fix = "Write ddpilot run train.py, or ddpilot run -m package.module; `ddpilot run --help` has more"
        raise LaunchError(_DID, found="no script is given", fix=fix)
    if given.pop("standalone", False):
        fewest, most = given.get("nnodes", (1, 1))
        if most != 1:
            fix = "--standalone is one node: leave out one of the two"
            nnodes = most if fewest == most else f"{fewest}:{most}"
            raise LaunchError(_DID, found=f"--standalone and --nnodes {nnodes}", fix=fix)
        for name in ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port"):  # torchrun ignores them too
            given.pop(name, None)
    if "timeout" in given.get("rdzv_conf", {}):
        text = given["rdzv_conf"].pop("timeout")
        given.setdefault("rdzv_timeout_s", parser.read([f"--rdzv-timeout={text}"])["rdzv_timeout_s"])
    check_signals(given.get("signals", ()))
    run = RunOptions(target=words.script, args=words.args, **given)
    return run, WatchOptions(**{"on_finding": "stop", **watching})


def watched_variables(watching: WatchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that enable watching in Python ranks started by a program, as under torchrun. `environ` overrides."""
    action = watching.on_finding if isinstance(watching.on_finding, str) else "stop"
    wanted = {WATCH_VARIABLE: "1", GUARD_VARIABLE: str(int(watching.guard)), ACTION_VARIABLE: action}
    return {name: environ.get(name, text) for name, text in wanted.items()}


def _words_from_environ(parser: RunParser, environ: Mapping[str, str]) -> list[str]:
    """Words for the variables that torchrun reads too and job operators set: PET_NPROC_PER_NODE, PET_NNODES, ..."""
    words = []
    for flag in parser.flags:
        if flag == "--help":
            continue
        value = environ.get(f"PET_{flag.removeprefix('--').upper().replace('-', '_')}")
        if value and parser.takes_value(flag):
            words.append(f"{flag}={value}")
        elif value and value.lower() not in _OFF:
            words.append(flag)
    return words


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    if not fewest.isdecimal() or not (most or fewest).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, nor MIN:MAX")
    return int(fewest), int(most or fewest)


def _host(text: str) -> str | None:
    return text.strip("[]") or None  # torchrun accepts an IPv6 address in brackets


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _local_ranks(text: str) -> frozenset[int]:
    try:
        return frozenset(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of local ranks such as 0,2") from None


def _conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of pairs such as read_timeout=60,is_host=1")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _streams(text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d:[0-3](,\d:[0-3])*", text):  # torch's agent accepts only one digit too
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 3 (both streams), 1 (stdout), 2 (stderr) or 0 (neither), nor one of them by local rank, "
            "as in 0:3,1:2"
        )
    return text


class RunParser(OptionParser):
    """The parser of the options of `ddpilot run`."""

    def takes_value(self, word: str) -> bool:
        """True if the option in `word` takes a value that is not part of the word. Raises KeyError if unknown."""
        flag, equals, _ = word.partition("=")
        if flag.startswith("--"):
            return self._option_string_actions[flag].nargs != 0 and not equals
        takes = self._option_string_actions[flag[:2]].nargs != 0
        if not takes and len(word) > 2:
            raise KeyError(word)
        return takes and len(word) == 2

    def refuse(self, argument: str | None, message: str) -> LaunchError:
        """Return the error for a wrong value."""
        flag = next((each for each in (argument or "").split("/") if each.startswith("--")), "")
        return LaunchError(f"reading {flag}" if flag else _DID, found=message, fix="`ddpilot run --help` has more")

    def refuse_unknown(self, words: Sequence[str], advice: str = "") -> LaunchError:
        """Return the error for an unknown option."""
        name = words[0].lstrip("-").partition("=")[0].replace("_", "-")
        if name in _REFUSED:
            fix = _REFUSED[name][0].upper() + _REFUSED[name][1:]
            return LaunchError(_DID, found=f"{words[0]} is not supported", fix=fix)
        guess = did_you_mean(f"--{name}", self.flags, show="{}".format, cutoff=0.8)
        return LaunchError(_DID, found=f"{words[0]} is not an option of `ddpilot run`", fix=f"{guess} {advice}".strip())


_OPTIONS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--nnodes", "N", _nodes, "number of nodes; MIN:MAX with a rendezvous backend of torch (1)"),
    ("--node-rank", "I", parse_int, "rank of this node, 0 to nnodes - 1"),
    ("--master-addr", "HOST", _host, "name or address of node 0, the same on every node"),
    ("--master-port", "PORT", parse_int, "port of the store on node 0 (29500; a free port on one node)"),
    ("--max-restarts", "N", parse_int, "maximum number of times that all ranks are restarted after a failure (0)"),
    ("--rdzv-timeout", "S", parse_seconds, "seconds that nodes wait for each other (900)"),
    ("--node-timeout", "S", parse_seconds, "seconds without a heartbeat of another node until this node exits (30)"),
    ("--shutdown-timeout", "S", parse_seconds, "seconds that ranks have to exit after Ctrl-C or SIGTERM (30)"),
    ("--monitor-interval", "S", parse_seconds, "seconds between two polls of the ranks (0.1)"),
    ("--log-dir", "DIR", Path, "also write each rank's output to files in this folder"),
    ("-r/--redirects", "STD", _streams, "streams for files only: 3 both, 1 stdout, 2 stderr, 0:1,1:2 by local rank"),
    ("-t/--tee", "STD", _streams, "streams for files and the screen"),
    ("--local-ranks-filter", "I,I", _local_ranks, "show the output of these local ranks only"),
    ("--rdzv-backend", "NAME", str, "static (ddpilot's, by node rank), or one of torch's: c10d, etcd, etcd-v2"),
    ("--rdzv-endpoint", "HOST:PORT", str, "endpoint for torch's backends; with static: master-addr:master-port"),
    ("--rdzv-id", "ID", str, "id of the job, the same on every node"),
    ("--rdzv-conf", "K=V,K=V", _conf, "further settings of torch's backends; timeout=S is --rdzv-timeout"),
    ("--local-addr", "HOST", _host, "address of this node for the other nodes, with torch's backends"),
    ("--role", "NAME", str, "ROLE_NAME of the ranks"),
    ("--signals-to-handle", "SIG,SIG", _names, f"signals to pass on to the ranks ({','.join(DEFAULT_SIGNALS)})"),
)
"""Flags, placeholder, type and help of the options that are one field of `RunOptions`."""

_FIELDS = {"local_ranks_filter": "shown_local_ranks", "signals_to_handle": "signals"}
"""Fields of `RunOptions` that differ from the option's name; fields in seconds end in "_s" besides."""


def make_parser() -> RunParser:
    """Return the parser of the options of `ddpilot run`. Names in its result are fields of the options classes."""
    parser = RunParser(
        "ddpilot run",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    add_nproc_option(parser)
    kind = parser.add_mutually_exclusive_group()
    for flags, const, text in (
        (("-m", "--module"), "module", "the script is a module, run as with `python -m`"),
        (("--no-python",), "program", "the script is a program of any kind"),
    ):
        kind.add_argument(*flags, dest="kind", action="store_const", const=const, help=text)
    parser.add_argument("--standalone", action="store_true", help="one node and a free port on loopback, as by default")
    watching = parser.add_mutually_exclusive_group()
    watching.add_argument("--watch", action="store_true", help="detect hangs, desyncs and wrong numbers, as by default")
    add_watch_options(parser, default="stop", group=watching)
    for names, metavar, read, text in _OPTIONS:
        name = names.rpartition("--")[2].replace("-", "_")
        field = f"{name}_s" if read is parse_seconds else _FIELDS.get(name, name)
        parser.add_argument(*names.split("/"), dest=field, metavar=metavar, type=read, help=text)
    return parser


@dataclass(frozen=True)
class Words:
    """`options`: the words of ddpilot's options; `script`: as given, or None; `args`: the script's, as given."""

    options: tuple[str, ...]
    script: str | None
    args: tuple[str, ...]


def split_words(words: Sequence[str]) -> Words:
    """Separate ddpilot's options from the script's. Raises LaunchError, with the correction, if that is impossible."""
    if words and not _is_option(words[0]) and words[0] != "--":
        script, after = words[0], list(words[1:])
        end = after.index("--") if "--" in after else len(after)
        ours, args = after[:end], after[end + 1 :]
        options, rest = _take_options(ours, lambda at: _correct(script, ours, args, at))
        if rest:
            found = f"`{rest[0]}` after the script is neither an option nor an option's value"
            raise LaunchError(_DID, found=found, fix=_correct(script, ours, args, len(ours) - len(rest)))
        return Words(options, script, tuple(args))
    options, rest = _take_options(list(words), lambda _: "`ddpilot run --help` lists the options")
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        return Words(options, None, ())
    # A `--` here can only separate the script from its arguments.
    args = rest[2:] if rest[1:2] == ["--"] else rest[1:]
    return Words(options, rest[0], tuple(args))


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _take_options(words: list[str], advise: Callable[[int], str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the leading options in `words` with their values, and the remaining words.

    `advise`: returns the advice for the word at an index that looks like an option but is unknown.
    """
    parser, found, at = make_parser(), list[str](), 0
    while at < len(words) and _is_option(words[at]):
        flag, equals, value = words[at].partition("=")
        word = f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else words[at]
        try:
            takes_next = parser.takes_value(word)
        except KeyError:
            raise parser.refuse_unknown([words[at]], advise(at)) from None
        found.append(word)
        at += 1
        if takes_next and at < len(words) and words[at] != "--":
            found[-1] += f"={words[at]}" if word.startswith("--") else words[at]
            at += 1
    return tuple(found), words[at:]


def _correct(script: str, ours: list[str], args: list[str], at: int) -> str:
    """The corrected command line if the word of `ours` at index `at` must belong to the script."""
    words = [script, *ours]
    if script in _STARTERS:
        while words[:1] and words[0] in (*_STARTERS, "-m"):
            words = words[1:]
        left_out = " ".join([script, *ours][: 1 + len(ours) - len(words)])
        return f"Leave out `{left_out}`: {shlex.join(['ddpilot', 'run', *words, *args])}"
    right = ["ddpilot", "run", script, *ours[:at], "--", *ours[at:], *args]
    return f"Arguments of the script come after `--`: {shlex.join(right)}"
