# SPDX-License-Identifier: Apache-2.0
"""Main function of a rank process: set up, run the user's function, report its value or exception, exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from ddpilot.launching.exception_report import render_unsent, report_exception, show_connections
from ddpilot.launching.interrupts import RankInterrupt, saw_interrupt
from ddpilot.launching.rank_reports import RankStart, Returned, Taken
from ddpilot.launching.rank_server.fork_safety import write_to
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.pickling import importable_from_main, open_parcel, pack_parcel
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.module_names import SPAWNED_MAIN
from ddpilot.user_files import install_sources

PARCEL_VARIABLE = "DDPILOT_PARCEL"


def run_rank(control_fd: int, out_fd: int, err_fd: int) -> NoReturn:
    """Run as a rank: receive the start message on `control_fd`, call the function, send its outcome, exit."""
    write_to(out_fd, err_fd)
    control = socket.socket(fileno=control_fd)
    interrupts = RankInterrupt(functools.partial(_report_taken, control))
    signal.signal(signal.SIGINT, interrupts)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        start, (parcel,) = fd_socket.receive(control)
    except fd_socket.Closed:  # the parent cancelled the launch before this rank started
        os._exit(1)
    code = _run(start, parcel, control, interrupts)
    _finish(code)


def _run(start: RankStart, parcel: int, control: socket.socket, interrupts: RankInterrupt) -> int:
    known: list[Any] = []
    try:
        _become(start, parcel)
        threading.Thread(target=_obey, args=(control,), name="ddpilot-control", daemon=True).start()
        (function, args, kwargs), known = open_parcel(map_private(parcel))
        _bind(known)
        with interrupts:
            value = function(*args, **kwargs)
        return _send_value(control, start, value, known)
    except BaseException as error:  # whatever the user's function raises is reported to the parent
        return _send_error(control, start, error, known)


def _become(start: RankStart, parcel: int) -> None:
    """Take over the parent's environment, directory, path and arguments; reseed; create an empty ``__main__``."""
    os.environ.clear()
    os.environ.update(start.environ)
    os.environ[PARCEL_VARIABLE] = f"/proc/{os.getpid()}/fd/{parcel}"
    os.chdir(start.working_directory)
    sys.path[:] = start.sys_path
    sys.argv[:] = start.argv
    importlib.invalidate_caches()
    tempfile.tempdir = None  # imports in the server may have cached it
    time.tzset()
    install_sources(start.sources)
    main = types.ModuleType("__main__")
    # DataLoader workers that are not forked import this module as their __main__; it opens the parcel again.
    main.__spec__ = ModuleSpec(SPAWNED_MAIN, None)
    vars(main).update(start.main)
    sys.modules["__main__"] = main

    import torch

    torch.set_num_threads(start.num_threads)
    random.seed()
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()

    from ddpilot.group.store import number_env_rendezvous
    from ddpilot.group.teardown import let_works_end

    let_works_end()
    number_env_rendezvous(start.environ["MASTER_ADDR"], int(start.environ["MASTER_PORT"]))
    for hook in start.hooks:
        pkgutil.resolve_name(hook)(start)


def _bind(definitions: list[Any]) -> None:
    """Make shipped definitions importable from ``__main__``, where pickles created by ranks refer to them."""
    vars(sys.modules["__main__"]).update(importable_from_main(definitions))


def _obey(control: socket.socket) -> None:
    """Execute the parent's requests, even while the main thread is stuck in C++. Ends when the parent closes."""
    from ddpilot.group.teardown import free_group

    while True:
        try:
            request, fds = fd_socket.receive(control)
        except fd_socket.Closed:
            return
        fd_socket.close_all(fds)
        if request == "free":
            free_group()


def _report_taken(control: socket.socket) -> None:
    with contextlib.suppress(fd_socket.Closed):  # the parent, whose limit for interrupted ranks this extends, is gone
        fd_socket.send(control, Taken())


def _send_value(control: socket.socket, start: RankStart, value: Any, known: list[Any]) -> int:
    did = f"could not send back what `{start.function_name}` returned"
    parcel, _ = ship("ddpilot-result", {"result": value}, value, did=did, known=known)
    try:
        fd_socket.send(control, Returned(time.monotonic(), saw_interrupt()), [parcel])
    except OSError as closed:
        sys.stderr.write(render_unsent(start.rank, start.function_name, str(closed.strerror)))
        return 1
    finally:
        os.close(parcel)
    return 0


def _send_error(control: socket.socket, start: RankStart, error: BaseException, known: list[Any]) -> int:
    report = report_exception(error)
    if report.exitcode == 0:
        _send_value(control, start, None, known)
        return 0
    show_connections(error)
    try:
        fds = [pack_parcel("ddpilot-error", error, known)[0]]
    except Exception as unpicklable:  # the report with the traceback as text is sent anyway
        sys.stderr.write(f"ddpilot: {type(error).__name__} cannot be pickled: {unpicklable}\n")
        fds = []
    try:
        fd_socket.send(control, report, fds)
    except fd_socket.Closed:
        traceback.print_exception(error)
    except OSError as closed:
        sys.stderr.write(report.traceback)
        sys.stderr.write(render_unsent(start.rank, start.function_name, str(closed.strerror)))
    fd_socket.close_all(fds)
    return report.exitcode


def _finish(exitcode: int) -> NoReturn:
    """Wait for the user's threads, run exit handlers, flush, and exit without running C++ destructors.

    gloo's and NCCL's static destructors can abort a process that did not destroy its groups.
    """
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a library's handler would raise inside an exit handler
        threading._shutdown()  # type: ignore[attr-defined]
        gc.disable()  # a collection in an exit handler could free a process group, whose destructor waits for its works
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the user's function closed it
            continue
    os._exit(exitcode)
