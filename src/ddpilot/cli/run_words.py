# SPDX-License-Identifier: Apache-2.0
"""Split the words after ``ddpilot run`` into ddpilot's options, the script, and the script's arguments.

If an option comes first, torchrun's rule applies: everything after the script belongs to the script. If the script
comes first, the words up to `--` are ddpilot's options and the words after it belong to the script.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.launching.elastic.target import LAUNCHERS

_DID = "reading the options of `ddpilot run`"


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
    Option("standalone", "", "one node, a free port on loopback: what is done anyway on one node"),
    Option("max-restarts", "N", "how often all ranks are started again after one failed (0)"),
    Option("rdzv-timeout", "S", "seconds that nodes wait for each other (900)"),
    Option("node-timeout", "S", "seconds without a sign of another node after which this one ends (30)"),
    Option("shutdown-timeout", "S", "seconds that ranks have after Ctrl-C or SIGTERM (30)"),
    Option("log-dir", "DIR", "also write each rank's output to files in this folder"),
    Option("redirects", "STD", "streams that go to files only: 3 all, 1 stdout, 2 stderr, 0:1,1:2 by local rank", "-r"),
    Option("tee", "STD", "streams that go to files and to the screen", "-t"),
    Option("local-ranks-filter", "I,I", "show the output of these local ranks only"),
    Option("watch", "", "look from outside why ranks do not get on: done anyway"),
    Option("no-watch", "", "record nothing and look at nothing"),
    Option("no-guard", "", "do not look for training that continues with wrong numbers"),
    Option("on-finding", "WHAT", "stop (default): an error ends the job; report: it is shown, and the job continues"),
    Option("stall-warn", "S", "seconds for which ranks may wait for one that is alive before that is a warning (30)"),
    Option("rdzv-backend", "NAME", "static (ddpilot's, by node rank), or torch's: c10d, etcd, etcd-v2"),
    Option("rdzv-endpoint", "HOST:PORT", "where a rendezvous of torch's is; with static: master-addr:master-port"),
    Option("rdzv-id", "ID", "name of the job, the same on every node"),
    Option("rdzv-conf", "K=V,K=V", "more settings of a rendezvous of torch's; timeout=S is --rdzv-timeout"),
    Option("local-addr", "HOST", "address of this node that a rendezvous of torch's tells the others"),
    Option("role", "NAME", "ROLE_NAME of the ranks"),
    Option("monitor-interval", "S", "seconds between two looks at the ranks (0.1)"),
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
