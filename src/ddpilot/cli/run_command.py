# SPDX-License-Identifier: Apache-2.0
"""``ddpilot run``: turn command line words into options, run the script, and return an exit status."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from ddpilot.cli.run_words import OPTIONS, Words, split_words
from ddpilot.errors import DdpilotError, LaunchError, RankError, WatchError
from ddpilot.launching.elastic.options import RunOptions, TargetKind
from ddpilot.launching.elastic.run import prepare_run, run_prepared
from ddpilot.launching.elastic.signals import OutputClosedError, RunStoppedError, check_signals
from ddpilot.watch.companion import Watcher
from ddpilot.watch.external.instrumentation import ACTION_VARIABLE, GUARD_VARIABLE, WATCH_VARIABLE
from ddpilot.watch.options import Action, WatchOptions

FAILED_STATUS = 1
_DID = "reading the options of `ddpilot run`"
_OFF = ("", "0", "false", "no", "off")

_USAGE = """\
Usage: ddpilot run [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]...
       ddpilot run SCRIPT [OPTIONS] -- [ARGUMENTS OF THE SCRIPT]...

  Run a script on several ranks, as torchrun does, and be told which rank failed first.

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
    except OutputClosedError as error:
        return error.exitcode
    except RunStoppedError as error:
        print(f"ddpilot: {error.found}", file=sys.stderr)
        return error.exitcode
    except WatchError as error:
        print(f"ddpilot: {error}", file=sys.stderr)
        return FAILED_STATUS
    except RankError as error:
        print(f"ddpilot: {error}", file=sys.stderr)
        return FAILED_STATUS
    except DdpilotError as error:
        print(show(error), file=sys.stderr)
        return FAILED_STATUS
    finally:
        _drop_what_nobody_reads()
    return 0


def _drop_what_nobody_reads() -> None:
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
    said = {**_from_environ(environ), **words.options}
    if words.script is None:
        fix = "Write ddpilot run train.py, or ddpilot run -m package.module; `ddpilot run --help` has more"
        raise LaunchError(_DID, found="no script is given", fix=fix)
    if "standalone" in said:
        if said.get("nnodes", "1") not in ("1", "1:1"):
            fix = "--standalone is one node: leave out one of the two"
            raise LaunchError(_DID, found=f"--standalone and --nnodes {said['nnodes']}", fix=fix)
        ours = ("rdzv-backend", "rdzv-endpoint", "master-addr", "master-port")  # torchrun ignores them in this case
        said = {name: value for name, value in said.items() if name not in ours}
    given = {field: _read(name, said[name], read) for name, (field, read) in _READERS.items() if name in said}
    if "timeout" in given.get("rdzv_conf", {}):
        timeout_s = _read("rdzv-conf", given["rdzv_conf"].pop("timeout"), float)
        given.setdefault("rdzv_timeout_s", timeout_s)
    check_signals(given.get("signals", ()))
    return RunOptions(target=words.script, kind=_kind(said), args=words.args, **given)


def read_watch_options(words: Words, environ: Mapping[str, str]) -> WatchOptions:
    """Options for watching the run. Raises LaunchError for an invalid value."""
    said = {**_from_environ(environ), **words.options}
    if "watch" in said and "no-watch" in said:
        raise LaunchError(_DID, found="--watch and --no-watch", fix="Leave out one of the two")
    on_finding = said.get("on-finding", "stop")
    if on_finding not in get_args(Action):
        raise LaunchError("reading --on-finding", found=f"{on_finding!r}", fix="Give stop or report")
    return WatchOptions(
        watch="no-watch" not in said,
        guard="no-guard" not in said,
        on_finding=cast("Action", on_finding),
        stall_warn_s=_read("stall-warn", said.get("stall-warn", "30"), float),
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


def _kind(said: Mapping[str, str]) -> TargetKind:
    if "module" in said and "no-python" in said:
        raise LaunchError(_DID, found="-m and --no-python", fix="A module runs in Python: leave out one of the two")
    return "module" if "module" in said else "program" if "no-python" in said else "script"


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
