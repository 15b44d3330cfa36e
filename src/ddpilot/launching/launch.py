# SPDX-License-Identifier: Apache-2.0
"""Launch a function on ranks of this machine and return every rank's value. Does not import torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import (
    LAUNCH_VARIABLE,
    SERVER_VARIABLE,
    default_variables,
    resolve_nproc,
)
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.pickling import RankResults
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.launching.spawning import ForkedRanks, find_working_directory
from ddpilot.launching.supervisor import Supervisor
from ddpilot.launching.system_limits import limits_explained
from ddpilot.output.pipe_reader import PipeReader
from ddpilot.output.writer import LabelledWriter


def run_local(
    options: LaunchOptions,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make_observer: Callable[[str, int], LaunchObserver] = lambda name, count: LaunchObserver(),
) -> RankResults:
    """Run `function(*args, **kwargs)` on every rank and return the values by rank.

    `make_observer(function_name, num_ranks)` returns the observer of the launch. Raises ShipError or
    LaunchError before any rank starts, and RankError, LaunchTimeoutError or LaunchInterrupted afterwards.
    """
    name = check_function(function)
    _refuse_nested(os.environ, name)
    environ: Mapping[str, str] = {**default_variables(), **os.environ, **options.env}
    display = LabelledWriter(options.output, options.output_limit_bytes)
    count = resolve_nproc(options.nproc_per_node, environ, display.note, backend=options.backend)
    did = f"starting {count} rank{'s' * (count > 1)} of `{name}`"
    find_working_directory(did)
    parts = {"fn": function, "args": args, "kwargs": dict(kwargs)}
    with limits_explained(did), standard_fds_taken():
        parcel, known = ship("ddpilot-call", parts, (function, args, dict(kwargs)), did=did, known=None)
        is_clean, observer = False, LaunchObserver()
        try:
            spawner = ForkedRanks(options, environ, count, display.note, _main_paths())
            observer = make_observer(name, count)
            spawner.add_hooks(observer.hooks, observer.variables)
            pipes = PipeReader(count, display)
            with InterruptCatcher() as interrupts:
                parcels = Supervisor(spawner, pipes, options, name, known, interrupts, observer).run(parcel)
            is_clean = True
            return RankResults(parcels, known)
        except KeyboardInterrupt as error:
            if isinstance(error, LaunchInterrupted):
                raise
            raise LaunchInterrupted(f"{did} was interrupted before any of them ran it") from None
        finally:
            observer.end(is_clean)
            os.close(parcel)


def _main_paths() -> dict[str, str]:
    """`__file__` and `__package__` of this process's ``__main__``, if they are set."""
    main = vars(sys.modules["__main__"])
    return {name: text for name in ("__file__", "__package__") if isinstance(text := main.get(name), str)}


@contextlib.contextmanager
def standard_fds_taken() -> Iterator[None]:
    """Context manager that keeps newly opened files off descriptors 0 to 2, which a daemon may have closed.

    Otherwise C code that writes to stderr could write into a channel, and a process started with that channel would
    lose it.
    """
    taken: list[int] = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            taken.append(fd)
        os.close(fd)
        yield
    finally:
        fd_socket.close_all(taken)


def check_function(function: Callable[..., Any]) -> str:
    """Return the name of `function` for messages. Raises LaunchError if it is not callable or a call runs no code."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if not callable(function):
        raise LaunchError("launching", found=f"{function!r} is not callable", fix="Give a function and its arguments")
    call = type(inner).__call__ if callable(inner) else None
    kinds: dict[str, Callable[[Any], bool]] = {
        "a generator function": inspect.isgeneratorfunction,
        "a coroutine function": inspect.iscoroutinefunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
    }
    for kind, test in kinds.items():
        if test(inner) or test(call):
            raise LaunchError(
                f"launching `{name}`",
                found=f"it is {kind}: calling it runs none of its code",
                fix="Launch an ordinary function; inside it, consume the generator or call `asyncio.run`",
            )
    return str(name)


def _refuse_nested(environ: Mapping[str, str], name: str) -> None:
    if SERVER_VARIABLE in environ:
        raise LaunchError(
            f"launching `{name}`",
            found="this is the rank server, which imported your module: "
            "its file has the name of a module that torch imports, or it is in `preload`",
            fix='Rename the file, or launch under `if __name__ == "__main__":`',
        )
    launched, elastic = environ.get(LAUNCH_VARIABLE), environ.get("TORCHELASTIC_RUN_ID")
    if launched is None and elastic is None:
        return
    raise LaunchError(
        f"launching `{name}`",
        found=f"this process is itself rank {environ.get('RANK')} of {environ.get('WORLD_SIZE')} "
        f"(started by {'ddpilot' if launched == elastic else 'torchrun'})",
        fix=f"Call `{name}` directly: every rank runs this code",
    )
