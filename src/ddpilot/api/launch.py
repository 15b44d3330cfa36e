# SPDX-License-Identifier: Apache-2.0
"""`launch` and `Launcher`: run a function on every rank, from a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ddpilot.launching.keywords import SURE, check_keywords, explain_unknown, option_meant
from ddpilot.launching.local.host import check_function, run_local
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.results import RankResults
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.watcher import Watcher


@explain_unknown
@dataclass(frozen=True, kw_only=True)
class Launcher(LaunchOptions, WatchOptions):
    """Runs functions on ranks of this machine with the options of `LaunchOptions` and `WatchOptions`.

    They are checked when it is made; LaunchError for a value that cannot be meant.
    """

    def __post_init__(self) -> None:
        LaunchOptions.__post_init__(self)
        WatchOptions.__post_init__(self)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Run `fn(*args, **kwargs)` on every rank and return every rank's value, by rank.

        `fn` and its arguments may be defined in cells; they travel by value. Ranks see torchrun's environment and enter
        a process group themselves (`init_group()`, `init_process_group()`, or a library). Not collective: the parent
        calls it once.

        A rank whose function calls `sys.exit(0)` returns None. `os._exit` is a failure with any code, 0 included: the
        rank cannot be told from one that a library ended halfway, and what it has not flushed is lost.

        Raises ShipError (what cannot be pickled, by path) or LaunchError before any rank starts; RankError with the
        first failure in time; WatchError with what the watch found, where that ends the launch; LaunchTimeoutError
        after `timeout_s`; LaunchInterrupted, a KeyboardInterrupt, after Ctrl-C. In every case no process of the launch
        is left.
        """
        check_keywords(check_function(fn), fn, kwargs, lambda keyword: _fix_option(keyword, kwargs, "run"))
        return run_local(self, fn, args, kwargs, self._accompany)

    def _accompany(self, name: str, count: int) -> Watcher | None:
        return Watcher(self, name, count) if self.watch else None


def launch(fn: Callable[..., Any], /, *args: Any, nproc_per_node: int | str = "auto", **kwargs: Any) -> RankResults:
    """Run `fn(*args, **kwargs)` on `nproc_per_node` ranks of this machine; `results[0]` is what rank 0 returned.

    `nproc_per_node` ("auto": the visible accelerators, else 1) is the only keyword that `fn` does not get. For every
    other option there is `Launcher`, whose `run` says what is raised.
    """
    check_keywords(check_function(fn), fn, kwargs, lambda keyword: _fix_option(keyword, kwargs, "launch"))
    return Launcher(nproc_per_node=nproc_per_node).run(fn, *args, **kwargs)


def _fix_option(keyword: str, kwargs: Mapping[str, Any], called: str) -> str:
    """What to write in place of a keyword of `called` ("launch" or "run") that means an option; "" if none is meant."""
    option = option_meant(keyword, [field.name for field in fields(Launcher)], SURE)
    if not option:
        return ""
    if called == "launch" and option == "nproc_per_node":
        return f"The number of ranks is `nproc_per_node={kwargs[keyword]!r:.50}`"
    return f"Options go to the launcher: `Launcher({option}={kwargs[keyword]!r:.50}).run(...)`"
