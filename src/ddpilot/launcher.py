# SPDX-License-Identifier: Apache-2.0
"""`launch` and `Launcher`: run a function on every rank, from a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ddpilot.errors import RankError
from ddpilot.launching.launch import check_function, run_local
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import (
    SURE,
    LaunchOptions,
    advise_several_nodes,
    check_keywords,
    explain_unknown,
    option_meant,
)
from ddpilot.launching.shipping.pickling import RankResults
from ddpilot.slurm.launcher import SlurmLauncher
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions


@explain_unknown
@dataclass(frozen=True, kw_only=True)
class Launcher(LaunchOptions, WatchOptions):
    """Run functions on ranks of this machine, with options for the launch and for the watch.

    The options are validated on construction. Raises LaunchError for an invalid value.
    """

    def __post_init__(self) -> None:
        LaunchOptions.__post_init__(self)
        WatchOptions.__post_init__(self)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RankResults:
        """Run `fn(*args, **kwargs)` on every rank and return every rank's value, by rank.

        `fn` and its arguments may be defined in notebook cells; they are pickled by value. Ranks have torchrun's
        environment, and enter a process group themselves: by `init_group()`, `init_process_group()` or a library. Not
        collective: the parent calls it once.

        A rank whose function calls `sys.exit(0)` returns None. `os._exit` is a failure with any exit code, including 0:
        a library may have ended the process, and unflushed output is lost.

        Raises ShipError, with the path of what cannot be pickled, or LaunchError before any rank starts. Later it
        raises RankError for the earliest failure, WatchError if a finding of the watch ends the launch,
        LaunchTimeoutError after `timeout_s`, or LaunchInterrupted, a KeyboardInterrupt, after Ctrl-C. In every case all
        processes of the launch have exited.
        """
        check_keywords(check_function(fn), fn, kwargs, lambda keyword: _fix_option(keyword, kwargs, "run"))
        try:
            return run_local(self, fn, args, kwargs, self._make_observer)
        except RankError as error:
            if isinstance(error.__cause__, TypeError) and not error.rank_traceback:  # a function without a signature
                hints = (_fix_option(keyword, kwargs, "run") for keyword in kwargs)
                error.fix = error.fix or next(filter(None, hints), "")
            raise

    def _make_observer(self, name: str, count: int) -> LaunchObserver:
        return Watcher(self, name, count) if self.watch else LaunchObserver()


def launch(
    fn: Callable[..., Any], /, *args: Any, nproc_per_node: int | str = "auto", nodes: int | None = None, **kwargs: Any
) -> RankResults:
    """Run `fn(*args, **kwargs)` on `nproc_per_node` ranks of this machine; `results[0]` is what rank 0 returned.

    All keywords but these two are passed to `fn`; for other options use `Launcher` or `SlurmLauncher`.

    - `nproc_per_node`: number of ranks. "auto": one per visible accelerator, else 1.
    - `nodes`: None: run on this machine. A number: run as a Slurm job on that many nodes, with `nproc_per_node` ranks
      on each; "auto" is then the default of `SlurmLauncher`.

    Not collective: the parent calls it once. Raises what `Launcher.run` or `SlurmLauncher.run` raises.
    """
    if nodes is not None:
        return _launch_on_nodes(nodes, nproc_per_node).run(fn, *args, **kwargs)
    check_keywords(check_function(fn), fn, kwargs, lambda keyword: _fix_option(keyword, kwargs, "launch"))
    return Launcher(nproc_per_node=nproc_per_node).run(fn, *args, **kwargs)


def _launch_on_nodes(nodes: int, nproc_per_node: int | str) -> SlurmLauncher:
    if nproc_per_node == "auto":
        return SlurmLauncher(nodes=nodes)
    return SlurmLauncher(nodes=nodes, nproc_per_node=nproc_per_node)


def _fix_option(keyword: str, kwargs: Mapping[str, Any], called: str) -> str:
    """The advice if a keyword of `called` ("launch" or "run") looks like an option; "" if it does not."""
    if advice := advise_several_nodes(keyword):
        return advice
    option = option_meant(keyword, [field.name for field in fields(Launcher)], SURE)
    if not option:
        return ""
    if called == "launch" and option == "nproc_per_node":
        return f"The number of ranks is `nproc_per_node={kwargs[keyword]!r:.50}`"
    return f"Options go to the launcher: `Launcher({option}={kwargs[keyword]!r:.50}).run(...)`"
