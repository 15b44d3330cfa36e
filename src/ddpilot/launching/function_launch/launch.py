# SPDX-License-Identifier: Apache-2.0
"""Launch a function on ranks of this machine and return every rank's value. Does not import torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.launching.function_launch.supervisor import Supervisor
from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.nproc import resolve_nproc
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import (
    LAUNCH_VARIABLE,
    SERVER_VARIABLE,
    choose_num_threads,
    default_variables,
    module_paths,
    rank_variables,
)
from ddpilot.launching.rank_reports import RankStart
from ddpilot.launching.rank_server.client import RankHandle, RankServer, ensure_server, start_rank
from ddpilot.launching.rank_server.job import STORE, NotStarted, Start, Started, bind_listener
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.rank_results import RankResults
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.launching.system_limits import limits_explained
from ddpilot.output.cell_sources import collect_sources
from ddpilot.output.pipe_reader import PipeReader
from ddpilot.output.writer import LabelledWriter

_MAX_UNANSWERED = 16


def run_local(
    options: LaunchOptions,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make_observer: Callable[[str, int], LaunchObserver | None] = lambda name, count: None,
) -> RankResults:
    """Run `function(*args, **kwargs)` on every rank and return the values by rank.

    `make_observer(function_name, num_ranks)` returns the observer of the launch, or None. Raises ShipError or
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
        try:
            return _run_shipped(options, environ, count, name, parcel, known, display, make_observer)
        except KeyboardInterrupt as error:
            if isinstance(error, LaunchInterrupted):
                raise
            raise LaunchInterrupted(f"{did} was interrupted before any of them ran it") from None
        finally:
            os.close(parcel)


def _run_shipped(
    options: LaunchOptions,
    environ: Mapping[str, str],
    count: int,
    name: str,
    parcel: int,
    known: list[Any],
    display: LabelledWriter,
    make_observer: Callable[[str, int], LaunchObserver | None],
) -> RankResults:
    server = ensure_server(environ, options.preload, may_fork(options))
    if server.hello.dirty is not None and options.start_method != "spawn":
        note_unsafe_fork(server, options, display)
    observer = make_observer(name, count)
    is_clean = False
    try:
        starts = functools.partial(
            make_rank_start,
            options=options,
            environ=environ if observer is None else {**environ, **observer.variables},
            count=count,
            hooks=() if observer is None else observer.hooks,
            name=name,
            launch_id=uuid.uuid4().hex,
            working_directory=os.getcwd(),
        )
        results = _run_on(server, starts, count, parcel, PipeReader(count, display), options, name, known, observer)
        is_clean = True
        return results
    finally:
        if observer is not None:
            observer.end(is_clean)


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


def may_fork(options: LaunchOptions) -> bool:
    """True if ranks may be forked when that is safe."""
    return sys.platform == "linux" and options.start_method != "spawn"


def note_unsafe_fork(server: RankServer, options: LaunchOptions, display: LabelledWriter) -> None:
    """Show a notice that ranks start as fresh interpreters. Raises LaunchError if `start_method` is "fork"."""
    if options.start_method == "fork":
        raise LaunchError(
            'starting ranks with `start_method="fork"`',
            found=f"the rank server cannot be forked safely: {server.hello.dirty}",
            fix="Leave that module out of `preload`, or the start method at its default",
        )
    display.note(f"{server.hello.dirty}, so ranks start as fresh interpreters, which takes seconds; see `preload=`")


def find_working_directory(did: str) -> str:
    """Path of the working directory. Raises LaunchError if it was removed, since no process can start in it."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            did,
            found="the working directory of this process was removed",
            fix="Change to one that exists: `os.chdir(...)`, in a notebook `%cd ...`",
        ) from error


def make_rank_start(
    rank: int,
    port: int,
    sources: dict[str, list[str]],
    *,
    options: LaunchOptions,
    environ: Mapping[str, str],
    count: int,
    hooks: tuple[str, ...],
    name: str,
    launch_id: str,
    working_directory: str,
) -> RankStart:
    """The start message for rank `rank` of `count`, whose store listens on `port` of the loopback interface."""
    main = sys.modules["__main__"]
    num_threads = choose_num_threads(environ, count)
    variables = rank_variables(
        launch_id=launch_id,
        rank=rank,
        nproc_per_node=count,
        master_port=port,
        num_threads=num_threads,
        backend=options.backend,
    )
    return RankStart(
        launch_id=launch_id,
        rank=rank,
        environ={**environ, **variables},
        working_directory=working_directory,
        sys_path=module_paths(),
        argv=list(sys.argv),
        main={name: text for name in ("__file__", "__package__") if isinstance(text := vars(main).get(name), str)},
        num_threads=num_threads,
        hooks=hooks,
        sources=sources,
        function_name=name,
    )


def _num_answered(answers: list[Any]) -> int:
    return sum(isinstance(answer, (Started, NotStarted)) and answer.rank != STORE for answer in answers)


def _run_on(
    server: RankServer,
    make_start: Callable[..., RankStart],
    count: int,
    parcel: int,
    pipes: PipeReader,
    options: LaunchOptions,
    name: str,
    known: list[Any],
    observer: LaunchObserver | None,
) -> RankResults:
    handles: list[RankHandle] = []
    sources = collect_sources()
    try:
        with InterruptCatcher() as interrupts, bind_listener() as listener:
            port = listener.getsockname()[1]
            starts = [make_start(rank, port, sources) for rank in range(count)]
            with server.job(starts[0].launch_id, count) as job:
                fd_socket.send(job, Start(STORE), [listener.fileno()])
                listener.close()
                answers: list[Any] = []
                for start in starts:
                    handles.append(start_rank(job, start, parcel))
                    # Limit unanswered requests: if both sockets were full, server and parent would block each other.
                    while len(handles) - _num_answered(answers) > _MAX_UNANSWERED:
                        answers.append(fd_socket.receive(job)[0])
                if observer is not None:
                    observer.begin(handles, {name: "".join(lines) for name, lines in sources.items()})
                Supervisor(job, handles, pipes, options, name, known, interrupts, observer).run(answers)
        # `run` raises unless every rank has returned a value.
        return RankResults([handle.parcel for handle in handles if handle.parcel is not None], known)
    except fd_socket.Closed as error:
        raise LaunchError(
            f"starting {count} ranks of `{name}`",
            found=f"the rank server exited: {server.describe_end()}",
            fix="Launch again, which starts a new one. If it happens again, the usual cause is too little memory",
        ) from error
    finally:
        for handle in handles:
            handle.close()
