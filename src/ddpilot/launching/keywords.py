# SPDX-License-Identifier: Apache-2.0
"""Reject unknown keyword arguments before ranks start, and suggest the right name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ddpilot.errors import LaunchError, did_you_mean

_T = TypeVar("_T")

_OTHER_NAMES = {
    **dict.fromkeys(("ranks", "n", "np", "nproc", "nprocs", "num_ranks", "num_procs"), "nproc_per_node"),
    **dict.fromkeys(("world_size", "devices", "num_devices", "num_gpus", "num_processes"), "nproc_per_node"),
    **dict.fromkeys(("timeout", "limit_s"), "timeout_s"),
    "gpu": "gpus",
    "app": "apps",
}
"""Names of these options in torch.multiprocessing, Accelerate, Lightning and others."""

SURE = 0.8
"""Similarity that a name needs (0 to 1) when it might also be a keyword of something else."""


def option_meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name in `known` that `name` most likely means, or "" if none is similar. `cutoff`: similarity, 0 to 1."""
    known = list(known)
    other = _OTHER_NAMES.get(name, "")
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
                fix = f"Did you mean `{near}`?" if near else f"Its options are {', '.join(known)}"
                raise LaunchError(did, found=f"`{name}` is none of its options", fix=fix)
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
