# SPDX-License-Identifier: Apache-2.0
"""``ddpilot run``: turn command line words into options, run the script, and return an exit status.

If an option comes first, torchrun's rule applies: everything after the script belongs to the script. If the script
comes first, the words up to `--` are ddpilot's options and the words after it belong to the script.
"""

from __future__ import annotations

import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from ddpilot.errors import DdpilotError, LaunchError, RankError, WatchError, did_you_mean
from ddpilot.guard.hook import GUARD_VARIABLE
from ddpilot.launching.elastic.options import RunOptions, TargetKind
from ddpilot.launching.elastic.run import prepare_run, run_prepared
from ddpilot.launching.elastic.signals import OutputClosedError, RunStoppedError, check_signals
from ddpilot.launching.elastic.target import LAUNCHERS
from ddpilot.watch.companion import Watcher
from ddpilot.watch.external.instrumentation import ACTION_VARIABLE, WATCH_VARIABLE
from ddpilot.watch.options import Action, WatchOptions

FAILED_STATUS = 1
_DID = "reading the options of `ddpilot run`"
_OFF = ("", "0", "false", "no", "off")

_USAGE = """\
Usage: ddpilot run [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]...
       ddpilot run SCRIPT [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]...

  Run a script on several ranks, as torchrun does, and report which rank failed first.

  ddpilot run train.py -n 4 -- --epochs 3
  ddpilot run --nproc-per-node 4 train.py --epochs 3
  ddpilot run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 -n 4 train.py

Options, with - or _, with = or a blank; torchrun's PET_... variables count too:
"""


def run_words(words: Sequence[str], show: Callable[[DdpilotError], str], environ: Mapping[str, str]) -> int:
    """Execute ``ddpilot run`` with these words. Returns the exit status as torchrun does: 0, or 1 for a failure;
    75 if every rank of this node exited with 75 to be requeued.

    `show`: formats an error as text. Raises DdpilotError if the words, the script or this node are invalid, before
    any rank starts.
    """
    if not words or words[0] in ("-h", "--help"):
        print(render_help())
        return 0 if words else 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # ranks may print characters that this stream cannot encode
    split = split_words(words)
    watching = read_watch_options(split, environ)
    prepared = prepare_run(read_options(split, environ), environ)
    is_python = prepared.options.kind != "program"
    if watching.watch and not is_python:  # the program may start Python, once or several times
        prepared = replace(prepared, variables={**prepared.variables, **watched_variables(watching, environ)})
    try:
        run_prepared(prepared, functools.partial(Watcher, watching) if watching.watch and is_python else None)
    except RunStoppedError as error:
        if not isinstance(error, OutputClosedError):
            print(f"ddpilot: {error.found}", file=sys.stderr)
        return error.exitcode
    except (RankError, WatchError) as error:
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


def render_help() -> str:
    """The text of ``ddpilot run --help``."""
    rows = []
    for option in OPTIONS:
        spelled = f"{option.short + ', ' if option.short else ''}--{option.name} {option.metavar}".rstrip()
        rows.append(f"  {spelled:<30} {option.help}")
    return _USAGE + "\n".join(rows)


def read_options(words: Words, environ: Mapping[str, str]) -> RunOptions:
    """Build the options from `words` and torchrun's PET_ variables in `environ`. Raises LaunchError if invalid."""
    given = {**_from_environ(environ), **words.options}
    if words.script is None:
        fix = "Write ddpilot run train.py, or ddpilot run -m package.module; `ddpilot run --help` has more"
        raise LaunchError(_DID, found="no script is given", fix=fix)
    if "standalone" in given:
        if given.get("nnodes", "1") not in ("1", "1:1"):
            fix = "--standalone is one node: leave out one of the two"
            raise LaunchError(_DID, found=f"--standalone and --nnodes {given['nnodes']}", fix=fix)
        ours = ("rdzv-backend", "rdzv-endpoint", "master-addr", "master-port")  # torchrun ignores them in this case
        given = {name: value for name, value in given.items() if name not in ours}
    values = {field: _read(name, given[name], read) for name, (field, read) in _READERS.items() if name in given}
    if "timeout" in values.get("rdzv_conf", {}):
        timeout_s = _read("rdzv-conf", values["rdzv_conf"].pop("timeout"), float)
        values.setdefault("rdzv_timeout_s", timeout_s)
    check_signals(values.get("signals", ()))
    return RunOptions(target=words.script, kind=_kind(given), args=words.args, **values)


def read_watch_options(words: Words, environ: Mapping[str, str]) -> WatchOptions:
    """Options for watching the run. Raises LaunchError for an invalid value."""
    given = {**_from_environ(environ), **words.options}
    if "watch" in given and "no-watch" in given:
        raise LaunchError(_DID, found="--watch and --no-watch", fix="Leave out one of the two")
    on_finding = given.get("on-finding", "stop")
    if on_finding not in get_args(Action):
        raise LaunchError("reading --on-finding", found=f"{on_finding!r}", fix="Give stop or report")
    return WatchOptions(
        watch="no-watch" not in given,
        guard="no-guard" not in given,
        on_finding=cast("Action", on_finding),
        stall_warn_s=_read("stall-warn", given.get("stall-warn", "30"), float),
    )


def watched_variables(watching: WatchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that enable watching in Python ranks started by a program, as under torchrun. `environ` overrides."""
    action = watching.on_finding if isinstance(watching.on_finding, str) else "stop"
    wanted = {WATCH_VARIABLE: "1", GUARD_VARIABLE: str(int(watching.guard)), ACTION_VARIABLE: action}
    return {name: environ.get(name, text) for name, text in wanted.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that torchrun reads too and job operators set: PET_NPROC_PER_NODE, PET_NNODES, ..."""
    found = {}
    for option in OPTIONS:
        value = environ.get(f"PET_{option.name.upper().replace('-', '_')}")
        if value and (option.metavar or value.lower() not in _OFF):
            found[option.name] = value
    return found


def _kind(given: Mapping[str, str]) -> TargetKind:
    if "module" in given and "no-python" in given:
        raise LaunchError(_DID, found="-m and --no-python", fix="A module runs in Python: leave out one of the two")
    return "module" if "module" in given else "program" if "no-python" in given else "script"


def _read(name: str, text: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise LaunchError(f"reading --{name}", found=f"{text!r}", fix=f"Give {_TAKES[read]}") from error


def _count(text: str) -> int | str:
    return text if text in ("auto", "gpu", "cpu") else int(text)


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    return int(fewest), int(most or fewest)


def _host(text: str) -> str | None:
    return text.strip("[]") or None  # torchrun accepts an IPv6 address in brackets


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in text.split(","))


def _conf(text: str) -> dict[str, str]:
    pairs = [pair.split("=", 1) for pair in text.split(",") if pair.strip()]
    return {name.strip(): value.strip() for name, value in pairs}


def _streams(text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d:[0-3](,\d:[0-3])*", text):  # torch's agent accepts only one digit too
        raise ValueError(text)
    return text


_TAKES: Mapping[Callable[[str], Any], str] = {
    int: "a whole number",
    float: "a number of seconds",
    _count: "a number of ranks from 1 to 1024, or auto (one per GPU, else 1), gpu or cpu",
    _nodes: "a number of nodes; MIN:MAX with a rendezvous of torch's",
    _numbers: "local ranks: 0,2",
    _conf: "pairs: read_timeout=60,is_host=1",
    _streams: "3 (both streams), 1 (stdout), 2 (stderr) or 0 (neither), or one of them by local rank: 0:3,1:2",
}
"""Description of accepted values by reader, for readers that reject some values."""

_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "nproc-per-node": ("nproc_per_node", _count),
    "nnodes": ("nnodes", _nodes),
    "node-rank": ("node_rank", int),
    "master-addr": ("master_addr", _host),
    "master-port": ("master_port", int),
    "local-addr": ("local_addr", _host),
    "rdzv-backend": ("rdzv_backend", str),
    "rdzv-endpoint": ("rdzv_endpoint", str),
    "rdzv-id": ("rdzv_id", str),
    "rdzv-conf": ("rdzv_conf", _conf),
    "rdzv-timeout": ("rdzv_timeout_s", float),
    "node-timeout": ("node_timeout_s", float),
    "max-restarts": ("max_restarts", int),
    "monitor-interval": ("monitor_interval_s", float),
    "shutdown-timeout": ("shutdown_timeout_s", float),
    "signals-to-handle": ("signals", _names),
    "role": ("role", str),
    "log-dir": ("log_dir", Path),
    "redirects": ("redirects", _streams),
    "tee": ("tee", _streams),
    "local-ranks-filter": ("shown_local_ranks", _numbers),
}
"""Field of `RunOptions` and reader of its text, by option; a reader raises ValueError for an invalid value."""


@dataclass(frozen=True)
class Option:
    """One option. `metavar`: placeholder of its value, "" for a flag; `short`: short form such as "-n", or ""."""

    name: str
    metavar: str
    help: str
    short: str = ""


OPTIONS = (
    Option("nproc-per-node", "N", "ranks on this node: a number, auto (one per GPU, else 1), gpu or cpu", "-n"),
    Option("module", "", "the script is a module, run as `python -m` does", "-m"),
    Option("no-python", "", "the script is a program of any kind, started as it is"),
    Option("nnodes", "N", "number of nodes; MIN:MAX with a rendezvous of torch's"),
    Option("node-rank", "I", "number of this node, 0 to nnodes - 1"),
    Option("master-addr", "HOST", "name or address of node 0, the same on every node"),
    Option("master-port", "PORT", "port on node 0 where nodes and ranks meet (29500; on one node a free one)"),
    Option("standalone", "", "one node, a free port on loopback (the default on one node)"),
    Option("max-restarts", "N", "maximum number of restarts of all ranks after a failure (0)"),
    Option("rdzv-timeout", "S", "seconds that nodes wait for each other (900)"),
    Option("node-timeout", "S", "seconds without a heartbeat from a node after which this one terminates (30)"),
    Option("shutdown-timeout", "S", "seconds that ranks have after Ctrl-C or SIGTERM (30)"),
    Option("log-dir", "DIR", "also write each rank's output to files in this folder"),
    Option("redirects", "STD", "streams that go to files only: 3 all, 1 stdout, 2 stderr, 0:1,1:2 by local rank", "-r"),
    Option("tee", "STD", "streams that go to files and to the screen", "-t"),
    Option("local-ranks-filter", "I,I", "show the output of these local ranks only"),
    Option("watch", "", "detect hangs and desyncs (default)"),
    Option("no-watch", "", "disable the detection of hangs and desyncs"),
    Option("no-guard", "", "disable the detection of training with wrong numbers"),
    Option("on-finding", "WHAT", "stop (default): an error ends the job; report: it is shown, and the job continues"),
    Option("stall-warn", "S", "seconds for which ranks may wait for one that is alive before that is a warning (30)"),
    Option("rdzv-backend", "NAME", "static (ddpilot's, by node rank), or torch's: c10d, etcd, etcd-v2"),
    Option("rdzv-endpoint", "HOST:PORT", "where a rendezvous of torch's is; with static: master-addr:master-port"),
    Option("rdzv-id", "ID", "name of the job, the same on every node"),
    Option("rdzv-conf", "K=V,K=V", "more settings of a rendezvous of torch's; timeout=S is --rdzv-timeout"),
    Option("local-addr", "HOST", "address of this node for other nodes, with a rendezvous of torch's"),
    Option("role", "NAME", "ROLE_NAME of the ranks"),
    Option("monitor-interval", "S", "seconds between two polls of the ranks (0.1)"),
    Option(
        "signals-to-handle",
        "SIG,SIG",
        "signals that are passed on to the ranks (SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)",
    ),
)

_STARTERS = ("python", "python3", "torchrun", *LAUNCHERS)
_NEITHER = "`{}` after the script is neither an option nor an option's value"
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


@dataclass(frozen=True)
class Words:
    """`options`: by name with dashes, "" for a flag; `script`: as given, or None; `args`: the script's, as given."""

    options: Mapping[str, str]
    script: str | None
    args: tuple[str, ...]


def split_words(words: Sequence[str]) -> Words:
    """Separate ddpilot's options from the script's. Raises LaunchError, with the correction, if that is impossible."""
    if words and not _is_option(words[0]) and words[0] != "--":
        script, after = words[0], list(words[1:])
        ours, args = _cut(after)
        options, rest = _read_options(ours, lambda at: _stray(script, ours, args, at))
        if rest:
            raise LaunchError(
                _DID, found=_NEITHER.format(rest[0]), fix=_stray(script, ours, args, len(ours) - len(rest))
            )
        return Words(options, script, tuple(args))
    options, rest = _read_options(list(words), lambda _: "`ddpilot run --help` lists the options")
    if rest and rest[0] == "--":
        rest = rest[1:]
    if not rest:
        return Words(options, None, ())
    # A `--` here can only separate the script from its arguments.
    args = rest[2:] if rest[1:2] == ["--"] else rest[1:]
    return Words(options, rest[0], tuple(args))


def _cut(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--")


def _read_options(words: list[str], advise: Callable[[int], str]) -> tuple[dict[str, str], list[str]]:
    """The leading options in `words`, and the remaining words from the first one that is not an option.

    `advise`: returns the advice for the word at an index that looks like an option but is unknown.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(words) and _is_option(words[at]):
        word = words[at]
        option, value = _look_up(word)
        if option is None:
            raise _unknown(word, advise(at))
        if option.metavar and value is None:
            at += 1
            if at == len(words) or words[at] == "--":
                raise LaunchError(
                    _DID, found=f"{word} has no value", fix=f"Write {word} {option.metavar}: {option.help}"
                )
            value = words[at]
        if value is not None and not option.metavar:
            raise LaunchError(_DID, found=word, fix=f"--{option.name} takes no value: {option.help}")
        found[option.name] = value or ""
        at += 1
    return found, words[at:]


def _look_up(word: str) -> tuple[Option | None, str | None]:
    """The option that `word` names, and the value that is part of the same word; None for each that is missing."""
    if word.startswith("--"):
        text, equals, value = word[2:].partition("=")
        name = text.replace("_", "-")
        for option in OPTIONS:
            if option.name == name:
                return option, value if equals else None
        return None, None
    for option in OPTIONS:
        if option.short and word.startswith(option.short):
            glued = word[2:].removeprefix("=")
            if option.metavar or not glued:
                return option, glued or None
    return None, None


def _unknown(word: str, advice: str) -> LaunchError:
    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    if name in _REFUSED:
        return LaunchError(_DID, found=f"{word} is not taken", fix=_REFUSED[name][0].upper() + _REFUSED[name][1:])
    names = [option.name for option in OPTIONS]
    begun = [each for each in names if each.startswith(name)]
    guess = did_you_mean(name, names, show="--{}".format, cutoff=0.8) or (
        f"Did you mean --{begun[0]}?" if begun else ""
    )
    return LaunchError(_DID, found=f"{word} is not an option of `ddpilot run`", fix=f"{guess} {advice}".strip())


def _stray(script: str, ours: list[str], args: list[str], at: int) -> str:
    """The corrected command line if the word of `ours` at index `at` must belong to the script."""
    words = [script, *ours]
    if script in _STARTERS:
        while words[:1] and words[0] in (*_STARTERS, "-m"):
            words = words[1:]
        left_out = " ".join([script, *ours][: 1 + len(ours) - len(words)])
        return f"Leave out `{left_out}`: {shlex.join(['ddpilot', 'run', *words, *args])}"
    right = ["ddpilot", "run", script, *ours[:at], "--", *ours[at:], *args]
    return f"Arguments of the script come after `--`: {shlex.join(right)}"
