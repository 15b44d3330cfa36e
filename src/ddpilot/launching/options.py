# SPDX-License-Identifier: Apache-2.0
"""Options of a launch, validated on construction, and checks of keyword arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ddpilot.errors import LaunchError, did_you_mean
from ddpilot.output.writer import Output

StartMethod = Literal["auto", "fork", "spawn"]


def is_nproc(value: object) -> bool:
    """True if `value` can be given as `nproc_per_node`: 1 to 1024, "auto", "gpu" or "cpu"."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024
    return is_count or value in ("auto", "gpu", "cpu")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of one launch on this machine. Raises LaunchError for an invalid value."""

    is_repeated: ClassVar[bool] = False
    """True for a launch that many others like it follow at once: what each rank would import is imported first."""

    nproc_per_node: int | str = "auto"
    """Number of ranks, at most 1024. "auto": one per visible accelerator, or 1 with a hint if there is none; "gpu": one
    per visible accelerator, an error if there is none; "cpu": one per core that this process may use."""

    backend: str | None = None
    """Default backend of `init_group()` ("gloo", "nccl", "cpu:gloo,cuda:nccl"). None: chosen for the device."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, added to the parent's."""

    timeout_s: float | None = None
    """Seconds that the whole launch may take. After that the ranks' Python stacks are printed and the launch fails.
    None: no limit."""

    preload: tuple[str, ...] = ()
    """Modules that the rank server imports before it forks, so that ranks do not have to. If one starts threads or
    initializes CUDA on import, forking is unsafe: a notice is shown and ranks start as fresh interpreters instead."""

    output: Output = "labelled"
    """Which output of the ranks is shown: "labelled" (all of it, with the rank in front of each line), "rank_zero"
    (only rank 0's, without labels) or "silent" (none; an error still carries its rank's last lines)."""

    output_limit_bytes: int | None = None
    """Bytes of each rank's output to show; the rest is only counted. None: 1 MB in a notebook, else no limit."""

    stop_grace_s: float = 3.0
    """Seconds that ranks have after Ctrl-C or the stop button, for instance to save a checkpoint, before their process
    group is aborted; one second later they are killed. Ranks in a `Loop` or a `Trainer`, which stop together after an
    update, have at least 60 seconds as long as no rank has failed or exited."""

    start_method: StartMethod = "auto"
    """"fork" from the rank server, "spawn" a fresh interpreter per rank (slower, otherwise equivalent), or "auto": fork
    if the server can be forked safely."""

    def __post_init__(self) -> None:
        if not is_nproc(self.nproc_per_node):
            raise LaunchError(
                "reading `nproc_per_node`",
                found=f"{self.nproc_per_node!r}",
                fix='Give a number of ranks from 1 to 1024, or "auto", "gpu" or "cpu"',
            )
        for name, value in (("timeout_s", self.timeout_s), ("stop_grace_s", self.stop_grace_s)):
            if value is not None and not (_is_number(value) and value > 0):
                raise LaunchError(f"reading `{name}`", found=f"{value!r}", fix="Give seconds, more than 0")
        self._check_kinds(self.output_limit_bytes, self.backend, self.env)
        self._check_choice("output", self.output, get_args(Output))
        self._check_choice("start_method", self.start_method, get_args(StartMethod))
        preload: object = self.preload
        if isinstance(preload, str):
            raise LaunchError("reading `preload`", found=f"{preload!r}", fix=f"Write `preload=({preload!r},)`")
        for variable, text in self.env.items():
            self._check_variable(variable, text)

    def _check_kinds(self, limit_bytes: object, backend: object, env: object) -> None:
        if limit_bytes is not None and not (isinstance(limit_bytes, int) and limit_bytes >= 0):
            fix = "Give bytes, 0 or more, or None"
            raise LaunchError("reading `output_limit_bytes`", found=f"{limit_bytes!r}", fix=fix)
        if backend is not None and not isinstance(backend, str):
            raise LaunchError("reading `backend`", found=f"{backend!r}", fix='Give a name, such as "gloo", or None')
        if not isinstance(env, Mapping):
            raise LaunchError("reading `env`", found=f"{env!r}", fix='Give a mapping, such as {"NAME": "value"}')

    def _check_variable(self, name: object, text: object) -> None:
        are_text = isinstance(name, str) and isinstance(text, str)
        if not are_text or "=" in str(name) or "\0" in f"{name}{text}":
            fix = "Names and values are text without NUL, and names have no ="
            raise LaunchError("reading `env`", found=f"{name!r}: {text!r}", fix=fix)

    def _check_choice(self, name: str, value: object, choices: tuple[str, ...]) -> None:
        if value not in choices:
            known = ", ".join(f'"{choice}"' for choice in choices)
            raise LaunchError(f"reading `{name}`", found=f"{value!r}", fix=f"Give one of {known}")


_T = TypeVar("_T")

OTHER_NAMES = {
    **dict.fromkeys(("ranks", "n", "np", "nproc", "nprocs", "num_ranks", "num_procs"), "nproc_per_node"),
    **dict.fromkeys(("world_size", "devices", "num_devices", "num_gpus", "ngpus", "num_processes"), "nproc_per_node"),
    **dict.fromkeys(("timeout", "limit_s"), "timeout_s"),
    "gpu": "gpus",
    "app": "apps",
}
"""Names of these options in torch.multiprocessing, Accelerate, Lightning and others."""

_OF_SEVERAL_NODES = ("nodes", "nnodes", "num_nodes", "gpus_per_node", "slurm", "hosts")


def advise_several_nodes(name: str) -> str:
    """Return the advice for a keyword that asks `launch` or `Launcher` for several nodes; "" for others."""
    if name not in _OF_SEVERAL_NODES:
        return ""
    return (
        "`Launcher` starts ranks on this machine. `ddpilot.launch(fn, nodes=2)` and `ddpilot.SlurmLauncher(nodes=2)` "
        "run a function on nodes of a Slurm cluster. `ddpilot.Session(slurm=True, nodes=2)` or `Session(hosts=[...])` "
        "keeps ranks there"
    )


SURE = 0.8
"""Similarity that a name needs (0 to 1) when it might also be a keyword of something else."""


def option_meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name in `known` that `name` most likely means, or "" if none is similar. `cutoff`: similarity, 0 to 1."""
    known = list(known)
    other = OTHER_NAMES.get(name, "")
    return other if other in known else next(iter(difflib.get_close_matches(name, known, 1, cutoff)), "")


def explain_unknown(cls: type[_T]) -> type[_T]:
    """Class decorator: `__init__` raises LaunchError, with the likely name, for a keyword that it does not accept."""
    init: Callable[..., None] = vars(cls)["__init__"]
    parameters = list(inspect.signature(init).parameters.values())[1:]
    known = [parameter.name for parameter in parameters]
    num_positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)

    @functools.wraps(init)
    def checked(self: _T, *args: Any, **kwargs: Any) -> None:
        did = f"making a {cls.__name__}"
        if len(args) > num_positional:
            value = args[num_positional]
            fix = f"Write `nproc_per_node={value!r}`" if isinstance(value, int) and not num_positional else ""
            fix = fix or f"Options have names: {', '.join(known)}"
            raise LaunchError(did, found=f"`{value!r:.50}` without a name", fix=fix)
        for name in kwargs:
            if name not in known:
                near = option_meant(name, known)
                fix = advise_several_nodes(name) if "nodes" not in known else ""
                fix = fix or (f"Did you mean `{near}`?" if near else f"Its options are {', '.join(known)}")
                raise LaunchError(did, found=f"it has no option `{name}`", fix=fix)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def check_keywords(name: str, fn: Callable[..., Any], kwargs: Mapping[str, Any], fix: Callable[[str], str]) -> None:
    """Raise LaunchError if `fn`, called `name` in the message, does not accept one of `kwargs`.

    `fix(keyword)` returns the advice for an unknown keyword, or "". Nothing is raised for a callable that has no
    signature or that accepts any keyword.
    """
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for keyword in kwargs:
        if keyword not in known:
            right = did_you_mean(keyword, known, cutoff=SURE) or fix(keyword)
            takes = f"Its parameters are {', '.join(known)}" if known else "It takes no keyword"
            raise LaunchError(f"calling `{name}`", found=f"it has no parameter `{keyword}`", fix=right or takes)
