# SPDX-License-Identifier: Apache-2.0
"""Main function of a session's rank: runs a kernel until the session ends."""

from __future__ import annotations

import bdb
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ipykernel.iostream import OutStream
from ipykernel.kernelapp import IPKernelApp
from IPython.core import page
from IPython.core.debugger import set_trace
from IPython.core.error import UsageError
from tornado import ioloop
from traitlets.config import Config

from ddpilot.module_names import SESSION_STREAM
from ddpilot.session.protocol.messages import KernelStart, writable
from ddpilot.session.rank.cleanup import end_workers_soon
from ddpilot.session.rank.error_report import CELL
from ddpilot.session.rank.interrupts import InterruptHandler
from ddpilot.session.rank.kernel import RankKernel
from ddpilot.session.rank.namespace import RankContext
from ddpilot.session.rank.requests import Requests

_FLUSH_S = 0.02  # ipykernel's default is 0.2 s


def serve_kernel(start: KernelStart) -> None:
    """Run a Jupyter kernel on the session's sockets until the session asks it to end."""
    rank = int(os.environ["RANK"])
    app = make_app(start.connection_file(rank), start.folder / f"{start.stem(rank)}.ipython")
    kernel = app.kernel
    context = RankContext(vars(sys.modules["__main__"]), start)
    context.prepare()
    kernel.interrupt_handler = InterruptHandler(app.control_thread.io_loop)
    kernel.requests = Requests(context, start.parcel_socket(rank), kernel.interrupt_handler, kernel.freeing)
    _wake_on_signals()
    end_workers_soon()
    use_pdb()
    register_misplaced(kernel.shell)
    gc.collect()
    gc.freeze()  # existing objects are permanent: collections after cells then skip them
    app.start()
    context.finish()


def _wake_on_signals() -> None:
    """Make signals wake the kernel's event loop.

    Otherwise the interrupt of a cell that awaits something would take effect only at the next message.
    """
    loop = ioloop.IOLoop.current()
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    loop.add_handler(woken, _drain, ioloop.IOLoop.READ)
    signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)


def _drain(woken: socket.socket, _events: int) -> None:
    woken.recv(4096)


class RankApp(IPKernelApp):
    """Starts a kernel from a connection file.

    Has no heartbeat and no parent poller, as the session sees a rank exit.
    """

    def init_poller(self) -> None:
        """Watch no parent process: ipykernel would read the pid of the notebook's parent from the environment."""
        self.poller = None

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Parse nothing: there is no command line, and building a parser is a tenth of the start of a kernel."""

    def load_config_file(self, *_args: Any, **_kwargs: Any) -> None:
        """Read no configuration files: a rank has no profile of its own."""

    def _configure_logging(self) -> None:
        """Leave the handlers of all loggers unchanged; traitlets would close them."""
        logging.getLogger(type(self).__name__).setLevel(logging.CRITICAL)

    def init_heartbeat(self) -> None:
        """Open no heartbeat channel."""

    def configure_tornado_logger(self) -> None:
        """Leave logging unchanged; ipykernel would log to the stream that tornado finds."""
        logging.getLogger("tornado").addHandler(logging.NullHandler())


@contextlib.contextmanager
def _own_profile(folder: Path) -> Iterator[None]:
    """Prevent IPython from reading and writing the user's profile."""
    before = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["IPYTHONDIR"]
        if before is not None:
            os.environ["IPYTHONDIR"] = before


def make_app(connection_file: Path, ipython_folder: Path) -> RankApp:
    """Create a kernel on the sockets in `connection_file`, ready to `start()`. Its namespace is ``__main__``."""
    main = sys.modules["__main__"]
    config = Config()
    config.HistoryManager.enabled = False  # do not write to the user's history
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.cache_size = 0  # `Out` would keep every tensor displayed by a cell
    config.InteractiveShell.enable_tip = False  # choosing a tip would consume a seeded random number
    config.RankKernel._execute_sleep = 0.0  # the session waits for "idle", which follows all output
    config.Completer.use_jedi = False  # the namespace suffices, and jedi's first use takes a second
    config.IPKernelApp.kernel_class = RankKernel
    with _own_profile(ipython_folder):
        app = RankApp(
            config=config,
            connection_file=str(connection_file),
            outstream_class=SESSION_STREAM,
            capture_fd_output=False,  # the session reads descriptors 1 and 2 itself, also after a crash
            quiet=True,
            user_ns=vars(main),
            log_level=logging.CRITICAL,
        )
        app.initialize([])
    app.kernel.user_module = main
    app.kernel.shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # pager payloads are ignored
    sys.modules["__main__"] = main  # IPython has replaced it by a module with the same dictionary
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, OutStream)
        stream.flush_interval = _FLUSH_S
    return app


class RankStream(OutStream):
    """Standard output or standard error of a rank.

    A lone surrogate in the output would keep ipykernel's thread from sending any more messages.
    """

    _has_output = False
    """True if something was written since the last flush."""

    def write(self, string: Any) -> int:
        """Write `string`. Raises TypeError if it is not a string, like every text stream."""
        try:
            return super().write(writable(string) if isinstance(string, str) else string) or 0
        finally:
            self._has_output = True

    def flush(self) -> None:
        """Send what was written and wait until it is sent; does not wait for ipykernel's thread if there is nothing.

        ipykernel flushes both streams three times per cell, which would be a third of the time of a short cell.
        """
        if self._has_output:
            self._has_output = False
            super().flush()


def use_pdb() -> None:
    """Make `breakpoint()` open pdb unless a debugger is attached, and make pdb show the lines of cells.

    Importing ipykernel has set `breakpoint()` to debugpy's function, which does nothing without a debugger; no debugger
    attaches to a rank on its own.
    """
    original_hook, original_canonic = sys.breakpointhook, bdb.Bdb.canonic

    def break_here(*args: Any, **kwargs: Any) -> Any:
        if _is_debugger_attached():
            return original_hook(*args, **kwargs)
        if os.environ.get("PYTHONBREAKPOINT"):  # "0", or a debugger that the user has chosen
            return sys.__breakpointhook__(*args, **kwargs)
        return set_trace(sys._getframe().f_back)

    @functools.wraps(original_canonic)
    def canonic(debugger: bdb.Bdb, filename: str) -> str:
        # `linecache` has the cell's lines under "Cell In[7]", not under an absolute path made from it.
        return filename if filename.startswith(CELL) else original_canonic(debugger, filename)

    sys.breakpointhook = break_here
    bdb.Bdb.canonic = canonic  # type: ignore[method-assign, assignment]


def _is_debugger_attached() -> bool:
    debugpy = sys.modules.get("debugpy")
    return debugpy is not None and bool(debugpy.is_client_connected())


def register_misplaced(shell: Any) -> None:
    """Register both magics in a rank's `shell`, to raise an error that explains them instead of "not found"."""
    shell.register_magic_function(_refuse, "line_cell", "ddp")
    shell.register_magic_function(_refuse_second, "line", "%ddp")  # `%%ddp` below a cell's first line


def _refuse(line: str, cell: str | None = None) -> NoReturn:
    """`%ddp` belongs in the notebook: this code runs on the ranks."""
    if cell is not None:
        _refuse_second(line)
    typed = f"%ddp {line}".rstrip()
    raise UsageError(
        f"`{typed}` is for the notebook, and this cell runs on the ranks. Use a cell without `%%ddp`, or while "
        "auto is on `%%ddp --local`"
    )


def _refuse_second(line: str) -> NoReturn:
    """`%%ddp` belongs in the notebook: this code runs on the ranks."""
    typed = f"%%ddp {line}".rstrip()
    raise UsageError(
        f"`{typed}` is in a cell that already runs on the ranks. Leave it out; with options, make it the first line"
    )
