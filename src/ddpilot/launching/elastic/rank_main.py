# SPDX-License-Identifier: Apache-2.0
"""Main program of a rank of ``ddpilot run``: run the user's script as ``__main__`` and report its exception.

It is run by path, so that nothing in the working directory is mistaken for a part of ddpilot. It must be transparent:
the script has the arguments, the module path and the ``__main__`` that plain Python gives it, tracebacks start at its
own lines, and it exits as it would without this program.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import NoReturn

from ddpilot.launching.elastic.options import TargetKind
from ddpilot.launching.exception_report import (
    exitcode_of,
    prune_guard,
    report_exception,
    show_connections,
    skip_callers,
)
from ddpilot.launching.rank_reports import Raised

REPORT_VARIABLE = "TORCHELASTIC_ERROR_FILE"
REPORT_KEY = "ddpilot"
HOOKS_VARIABLE = "DDPILOT_RANK_HOOKS"
"""Functions, as "module:name" separated by commas, that a rank calls as soon as the script has imported torch."""

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Run `argv`: the agent's pid, "script" or "module", the path or name, then the script's arguments."""
    agent_pid, kind, target, *args = argv
    _die_with(int(agent_pid))
    faulthandler.enable(all_threads=False)
    _wait_for_torch(os.environ.pop(HOOKS_VARIABLE, ""))
    try:
        run_as_main(kind, target, args)
    except BaseException as error:
        prune_guard(error)
        _report(error)
        if not isinstance(error, SystemExit):
            _hide_own_frames(error)
        raise


def _die_with(agent_pid: int) -> None:
    """Ask to be killed when the agent dies; an orphaned rank would keep its port and its GPU."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        os._exit(1)


def _wait_for_torch(hooks: str) -> None:
    """Call `hooks` once torch has been imported, not earlier: a script may set variables that torch reads on import."""
    from ddpilot.environments.interpreter import when_imported

    def call_hooks(_torch: types.ModuleType) -> None:
        from ddpilot.group.teardown import let_works_end

        let_works_end()
        start = types.SimpleNamespace(rank=int(os.environ["RANK"]), environ=dict(os.environ))
        for hook in filter(None, hooks.split(",")):
            pkgutil.resolve_name(hook)(start)

    when_imported("torch", REPORT_KEY, call_hooks)


def run_as_main(kind: str, target: str, args: list[str]) -> None:
    """Run a "script" or a "module" as the ``__main__`` of this process; `sys.path[0]` is replaced as Python sets it."""
    if kind == "module":
        _run_module(target, args)
    else:
        _run_script(target, args)


def _fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    return module


def _run_script(given: str, args: list[str]) -> None:
    sys.argv[:] = [given, *args]
    path = os.path.abspath(given)
    if pkgutil.get_importer(path) is not None:
        _run_application(given)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = _fresh_main()
    # As in plain Python: multiprocessing finds the script by its file, since there is no spec.
    vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path), __spec__=None, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _run_application(given: str) -> None:
    """Run a directory or zip file with a ``__main__.py`` as Python does, for any `sys.flags.safe_path`."""
    place = os.path.join(os.getcwd(), given)  # Python keeps "./" and a trailing "/" too
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, place)
    else:
        sys.path[0] = place
    _fresh_main()
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_module(name: str, args: list[str]) -> None:
    sys.argv[:] = ["-m", *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls; run_module() is not the same


def _hide_own_frames(error: BaseException) -> None:
    """Let the interpreter handle the exception as usual, but start its traceback at the user's frames."""
    frames, theirs = skip_callers(error.__traceback__), sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, found: TracebackType | None) -> None:
        if value is not error:
            theirs(kind, value, found)
            return
        sys.last_traceback = frames
        theirs(kind, value.with_traceback(frames), frames)

    sys.excepthook = hook


def _report(error: BaseException) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if not path or exitcode_of(error) == 0:
        return
    try:
        show_connections(error)
        _write_report(path, report_exception(error))
    except Exception as failure:  # never mask the user's exception, for example if the disk is full
        sys.stderr.write(f"ddpilot: this exception could not be reported to the agent: {failure!r}\n")


def _write_report(path: str, raised: Raised) -> None:
    """Write the error file that torch's agent reads, with additional fields; atomically."""
    extra = {"py_callstack": raised.traceback, "timestamp": str(int(time.time()))}
    torchs = {"message": f"{raised.type_name.rpartition('.')[2]}: {raised.message}", "extraInfo": extra}
    with open(f"{path}.writing", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump({"message": torchs, REPORT_KEY: asdict(raised)}, file)
    os.replace(f"{path}.writing", path)


if __name__ == "__main__":
    main(sys.argv[1:])


class ScriptCall:
    """Runs a script or module as the ``__main__`` of a rank, as in a fresh interpreter except that torch is imported.

    `stdout`: file that receives what rank 0 writes to stdout, if that is not "".
    """

    def __init__(self, name: str, kind: TargetKind, target: str, args: tuple[str, ...], *, stdout: str = "") -> None:
        self.__qualname__ = name
        self._main = (kind, target, args)
        self._stdout = stdout

    def __call__(self) -> None:
        """Run the script; in a rank."""
        import sys

        import torch

        if self._stdout and os.environ["RANK"] == "0":
            descriptor = os.open(self._stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.close(descriptor)
        # Ranks of a launch seed all devices at random; a fresh interpreter has a fixed seed on accelerators.
        own_seed = torch.initial_seed()
        torch.manual_seed(torch.Generator().initial_seed())
        torch.default_generator.manual_seed(own_seed)
        sys.path.insert(0, "")
        kind, target, args = self._main
        with _hard_exits_raise():
            run_as_main(kind, target, list(args))


@contextlib.contextmanager
def _hard_exits_raise() -> Iterator[None]:
    """Context manager in which `os._exit` raises SystemExit in the main thread of this process.

    Some scripts end with it. A rank of a launch that ends this way has failed, since it reports nothing.
    """
    pid, original = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        original(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = original
