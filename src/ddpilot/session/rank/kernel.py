# SPDX-License-Identifier: Apache-2.0
"""`RankKernel` and `RankShell`: ipykernel's kernel and shell, extended to report when and how a cell failed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import zmq
from ipykernel.compiler import XCachingCompiler
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.formatters import DisplayFormatter
from IPython.core.history import HistoryManager
from torch.distributed import distributed_c10d as c10d
from traitlets import Instance

from ddpilot.environments.private_files import make_own_folder
from ddpilot.group.ddp_models import find_models
from ddpilot.launching.exception_report import is_victim, message_of, prune_guard, user_traceback
from ddpilot.launching.rank_reports import Raised
from ddpilot.session.protocol.messages import (
    BEGUN,
    FREE,
    REPLY,
    REPORT_KEY,
    REQUEST,
    CellRequest,
    Finish,
    Free,
    Report,
    read_request,
    writable,
)
from ddpilot.session.rank.cleanup import forget_error, release_memory
from ddpilot.session.rank.error_report import CELL, group_state, holds_group, report_error
from ddpilot.session.rank.interrupts import TimeLimitExpired, time_limit, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpilot.session.rank.interrupts import InterruptHandler
    from ddpilot.session.rank.requests import Requests

_CONNECT_S = 0.01
"""Seconds between two attempts to send an input request while the session is not connected to the stdin channel yet."""

_SENDING_S = 0.02
"""Seconds within which a reply, and the status that follows it, have been sent."""

_COLOURS_CPU_S, _COLOURS_S = 0.3, 1.5
"""Limits in seconds of CPU time and of time for IPython to format a traceback: with large files or deep recursion this
takes seconds of CPU time, on all failing ranks at once, which are killed as stuck after about 2 s."""

_PLAIN = (bool, int, float, complex, str, bytes)
_TEXT = "text/plain"

_NO_EXIT = "`exit` and `quit` do not stop a rank; `%ddp stop` (or `session.stop()`) stops all ranks"

_NO_DEBUG = (
    "`%debug` has no error to inspect: a rank drops the frames of an error after its cell, to release tensors. "
    "`%pdb on` opens pdb at the next error, `breakpoint()` at a line"
)


class RankCompiler(XCachingCompiler):
    """Names code objects after their cell, so that tracebacks, stacks and flight rings show ``Cell In[7]``."""

    def get_code_name(self, _raw_code: str, _code: str, number: int) -> str:
        """Return the file name of a cell's code object."""
        return f"{CELL}{number}]"


class RankHistory(HistoryManager):
    """The cells of a rank, without the empty entries of those that ran elsewhere."""

    def get_range(self, *args: Any, **kwargs: Any) -> list[tuple[int, int, Any]]:
        """Return the session, number and text of each cell, as IPython does for `%history`."""
        return [each for each in super().get_range(*args, **kwargs) if each[2] and each[2] != ("", None)]


class RankExit(ZMQExitAutocall):
    """`exit` and `quit`; as the last line of a cell they show how to stop the ranks."""

    def __call__(self, keep_kernel: bool = False) -> None:  # noqa: ARG002 - IPython's signature
        """Print how to stop the ranks. IPython sets the shell of an autocall in cells of one line only."""
        sys.stderr.write(f"{_NO_EXIT}\n")

    def __repr__(self) -> str:
        return _NO_EXIT


class RankDisplayFormatter(DisplayFormatter):
    """Asks only the formatter of text for the representation of a number or a string, unless others were given some.

    Asking all ten takes a sixth of the time of a short cell.
    """

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        """Return the representations of `obj` by MIME type, and their metadata."""
        if include is None and exclude is None and type(obj) in _PLAIN and not self._has_printers():
            include = (_TEXT,)
        return super().format(obj, include, exclude)

    def _has_printers(self) -> bool:
        return any(
            each.type_printers or each.deferred_printers for kind, each in self.formatters.items() if kind != _TEXT
        )


class RankShell(ZMQInteractiveShell):
    """Records the exception of a cell and the time at which it was raised."""

    exiter = Instance(RankExit, ())

    failure: tuple[BaseException, float] | None = None
    unstored: int | None = None
    """Number of the cell that is about to run; None once its text is in `In`."""

    _debugs: bool | None = None
    """While a traceback is formatted: True if pdb is to open afterwards (`%pdb on`), else False. None at other
    times."""

    is_freed = False
    """True if the rank was freed while this cell ran, so that its error follows from a different rank's failure."""

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Format the traceback; the session shows the one of the rank that failed first."""
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None and self.failure is None:
            self.failure = (error, time.monotonic())
        with uninterrupted():
            if error is not None:
                prune_guard(error)
            if isinstance(error, SystemExit):
                warnings.filterwarnings("ignore", message="To exit: use")
            if error is not None and (self.is_freed or _is_plain(error)):
                self._last_traceback = user_traceback(error).splitlines()
            else:
                self._debugs = False
                try:
                    with time_limit(_COLOURS_CPU_S, _COLOURS_S):
                        super().showtraceback(exc_tuple, *args, **kwargs)
                except TimeLimitExpired:
                    self._last_traceback = user_traceback(error).splitlines() if error is not None else None
        wants_debugger, self._debugs = self._debugs, None
        if wants_debugger:
            super().debugger(force=True)

    def debugger(self, force: bool = False) -> None:
        """Open pdb on the last error: now, or after the traceback if one is being formatted under a time limit."""
        if self._debugs is not None:
            self._debugs = True
        elif getattr(self.InteractiveTB, "tb", None) is None:
            sys.stderr.write(f"{_NO_DEBUG}\n")
        else:
            super().debugger(force=force)

    def show_usage_error(self, exc: BaseException) -> None:
        """Keep the message for the session's error; IPython would also print it, on every rank."""
        self._last_traceback = [f"UsageError: {exc}"]

    def _showtraceback(self, _etype: Any, _evalue: Any, stb: list[str]) -> None:
        self._last_traceback = stb

    def ask_exit(self) -> None:
        """Print that `exit` does not end a rank, and do nothing else."""
        sys.stderr.write(f"{_NO_EXIT}\n")

    async def run_cell_async(self, raw_cell: str, *args: Any, transformed_cell: Any = None, **kwargs: Any) -> Any:
        """Run a cell and make its text available to `In`, `%history` and IPython's rule for a trailing ";".

        `store_history` is not used, because IPython would then format every error a second time, which takes seconds.
        """
        if self.unstored is not None:
            self._store_input(self.unstored, raw_cell, transformed_cell or raw_cell)
            self.unstored = None
        return await super().run_cell_async(raw_cell, *args, transformed_cell=transformed_cell, **kwargs)

    def init_history(self) -> None:
        """Create the history."""
        self.history_manager = RankHistory(shell=self, parent=self)
        self.configurables.append(self.history_manager)  # type: ignore[arg-type]  # IPython annotates no type

    def _store_input(self, number: int, raw: str, parsed: str) -> None:
        """Make `parsed` the last entry of `In`, at index `number`; entries of cells that ran elsewhere are ""."""
        history = self.history_manager
        assert history is not None
        for entries, text in ((history.input_hist_raw, raw), (history.input_hist_parsed, parsed)):
            entries.extend([""] * (number - len(entries)))
            entries.append(text.rstrip("\n"))

    def atexit_operations(self) -> None:
        """Run IPython's exit operations, unless they fail because the working directory was removed."""
        with contextlib.suppress(FileNotFoundError):
            super().atexit_operations()

    def init_display_formatter(self) -> None:
        """Create the formatter of results."""
        self.display_formatter = RankDisplayFormatter(parent=self)
        self.configurables.append(self.display_formatter)  # type: ignore[arg-type]  # IPython annotates no type

    def init_prompts(self) -> None:
        """Do not set `sys.ps1`.

        Libraries take it for an interactive prompt, and then refuse to run or use fork, as Lightning does.
        """

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: a rank has no windows."""


class RankKernel(IPythonKernel):
    """A kernel whose replies contain a `Report`, and that handles the `REQUEST` and `FREE` messages.

    `requests` serves the requests; `interrupt_handler` handles SIGINT.
    """

    shell_class = RankShell
    compiler_class = RankCompiler
    requests: Requests
    interrupt_handler: InterruptHandler

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.freeing = threading.Lock()
        self._has_failed = False
        """True if the last cell or request failed."""
        self._cleanup: tuple[asyncio.TimerHandle, bool] | None = None
        """The clean-up that is due, and its `keep_cache`."""

        self.shell_handlers[REQUEST] = self.on_request
        self.control_handlers[FREE] = self.on_free

    @property
    def _rank_shell(self) -> RankShell:
        assert isinstance(self.shell, RankShell)
        return self.shell

    def _reply(self, stream: Any, kind: str, report: Report, parent: Any, ident: Any) -> None:
        assert self.session is not None
        self.session.send(stream, kind, {REPORT_KEY: report.to_content()}, parent, ident=ident)

    def _input_request(self, *args: Any, **kwargs: Any) -> str:
        # A ROUTER socket drops messages to unconnected peers, and the session may not be connected to this channel yet.
        self.stdin_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        while True:
            try:
                return str(super()._input_request(*args, **kwargs))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            time.sleep(_CONNECT_S)

    def pre_handler_hook(self) -> None:
        """Install the SIGINT handler before a cell or request."""
        super().pre_handler_hook()
        self.interrupt_handler.install()

    def _publish_execute_input(self, *_args: Any) -> None:
        """Publish nothing: the session knows the code of a cell."""

    def _publish_status(self, status: str, *args: Any, **kwargs: Any) -> None:
        if status != "busy":  # the session knows when a rank is busy
            super()._publish_status(status, *args, **kwargs)

    def _send_begun(self) -> None:
        # From here on an interrupt is not lost; the session delays interrupts until it receives this message.
        assert self.session is not None
        content = {"num_before": self.requests.context.num_before}
        self.session.send(self.iopub_socket, BEGUN, content, self.get_parent("shell"))

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell. The reply contains a report on how it ended."""
        shell = self._rank_shell
        cell = _read_cell(self.get_parent("shell"))
        shell.execution_count = shell.unstored = cell.number
        shell.failure = None
        shell.is_freed = False
        self.requests.context.begin(cell.scope)
        self._send_begun()
        try:
            try:
                self.interrupt_handler.arm()
                with self._profiling(cell.profile_folder):
                    reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
            finally:
                self.interrupt_handler.disarm()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # without a reply the session would wait forever
            self.interrupt_handler.disarm()
            shell.failure = self._rank_shell.failure or (error, time.monotonic())  # or raised while reporting it
            text = user_traceback(shell.failure[0]).splitlines()
            reply = {"status": "error", "ename": type(error).__name__, "evalue": message_of(error), "traceback": text}
        finally:
            self.requests.context.end()
        if changed := self.requests.context.describe_changed():
            sys.stderr.write(f"ddpilot: {changed}\n")
        if reply["status"] == "ok" and shell.failure is not None:  # for example a `__repr__` that raises
            sys.stderr.write("\n".join(shell._last_traceback or ()) + "\n")
        for name in ("ename", "evalue"):
            if name in reply:
                reply[name] = writable(reply[name])
        reply["traceback"] = [writable(line) for line in reply.get("traceback", ())]
        self._has_failed = reply["status"] != "ok"
        reply[REPORT_KEY] = self._report(reply).to_content()
        shell.failure = None
        return reply

    @contextlib.contextmanager
    def _profiling(self, folder: str) -> Iterator[None]:
        """Record where the time of updates goes, into `folder`; "" to record nothing. No hook is left afterwards."""
        if not folder:
            yield
            return
        from ddpilot.profiler.rank.probe import start_recording

        make_own_folder(Path(folder))  # on a different machine it is not there
        stop = start_recording(Path(folder), self.requests.context.topology.rank, find_models())
        try:
            yield
        finally:
            stop()

    def _report(self, reply: dict[str, Any]) -> Report:
        num_collectives = self.requests.context.count_collectives()
        if reply["status"] == "ok":
            return Report(**group_state(), num_collectives=num_collectives)
        text = "\n".join(reply.get("traceback", ()))
        if self._rank_shell.failure is not None:
            error, time_s = self._rank_shell.failure
            return report_error(error, text, time_s, num_collectives, self.requests.context.device)
        raised = Raised(  # a syntax error: the cell did not run
            time_s=time.monotonic(),
            type_name=reply["ename"],
            message=reply["evalue"],
            traceback=text,
            is_victim=False,
            interrupted=False,
            exitcode=1,
        )
        return Report(raised=raised, **group_state(), num_collectives=num_collectives)

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell. Once the session has the reply, drop the cell's error and collect garbage."""
        self._clean_up()
        await super().execute_request(stream, ident, parent)
        try:
            self.requests.context.after_cell()
        except Exception:  # noqa: BLE001  # an app's own code: the rank reports it on stderr and continues
            traceback.print_exc()
        self._clean_up_soon(keep_cache=_read_cell(parent).keep_cache)

    def _clean_up_soon(self, *, keep_cache: bool) -> None:
        """Clean up once reply and status have been sent, or when the next cell or request begins if that is earlier.

        It takes up to a second, in which no other thread runs while garbage is collected, nor those that send them.
        """
        self._cleanup = asyncio.get_running_loop().call_later(_SENDING_S, self._clean_up), keep_cache

    def _clean_up(self) -> None:
        if self._cleanup is None:
            return
        (timer, keep_cache), self._cleanup = self._cleanup, None
        timer.cancel()
        try:
            forget_error(self._rank_shell)  # `DataLoader` workers that the error kept alive end here
            release_memory(self.requests.context.device, keep_cache=keep_cache, has_failed=self._has_failed)
        except Exception:  # noqa: BLE001  # such as a device that has failed: the next cell runs, and says so
            traceback.print_exc()

    async def on_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Serve one of the session's own requests in the main thread, like a cell."""
        self._clean_up()
        request, scope = read_request(parent["content"])
        self.requests.context.begin(scope)
        self._send_begun()
        try:
            report = self.requests.serve(request)
        finally:
            self.requests.context.end()
        self._has_failed = report.raised is not None
        self._reply(stream, REPLY, report, parent, ident)
        self._clean_up_soon(keep_cache=self.requests.context.start.keep_cache)
        if isinstance(request, Finish):
            self.io_loop.add_callback(self._clean_up)
            self.io_loop.add_callback(self.io_loop.stop)

    async def on_free(self, stream: Any, ident: Any, parent: Any) -> None:
        """Free the main thread from a collective. Runs in the control channel's thread.

        A late request, for a group that has been replaced, is ignored: the new group stays.
        """
        with self.freeing:
            request = Free(**parent["content"])
            is_late = request.generation < self.requests.generation
            report = Report() if is_late else self._free(request.interrupt)
        self._reply(stream, REPLY, report, parent, ident)

    def _free(self, interrupt: bool) -> Report:
        from ddpilot.group.teardown import free_group, uses_device

        self._rank_shell.is_freed = True
        was_in = dist.is_initialized()
        backend = _backend() if was_in else None
        if interrupt and uses_device():
            # After the group is freed, code that waits for the device returns without an error: interrupt it before the
            # cell can continue with invalid results.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        freed = free_group()
        value = {
            "backend": backend,
            "still_stuck": list(freed.still_stuck),
            "unfinished": bool(freed.aborted) and self.requests.context.count_collectives() != 0,
        }
        return Report(has_group=was_in, value=value)


def _is_plain(error: BaseException) -> bool:
    """True if the error is shown without IPython's formatting.

    IPython shows no line for SystemExit and prints exception groups immediately, on every rank. Interrupts and victims
    of other ranks are rarely shown and are raised on all ranks at once: formatting them would take seconds.
    """
    return isinstance(error, (SystemExit, KeyboardInterrupt)) or is_victim(error) or holds_group(error)


def _read_cell(message: dict[str, Any]) -> CellRequest:
    return CellRequest.from_content(message["metadata"][REPORT_KEY])


def _backend() -> str:
    """Return the default group's backend in the form in which it would be requested."""
    config = str(c10d.get_backend_config())
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config
