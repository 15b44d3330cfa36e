# SPDX-License-Identifier: Apache-2.0
"""`RankApp`: ipykernel's application, adapted to a kernel that was not started by a user."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ipykernel.iostream import OutStream
from ipykernel.kernelapp import IPKernelApp
from IPython.core import page
from traitlets.config import Config

from ddpilot.session.rank.kernel import RankKernel

_FLUSH_S = 0.02  # ipykernel's default is 0.2 s


class RankApp(IPKernelApp):
    """Starts a kernel from a connection file.

    Has no heartbeat and no parent poller, as the session sees a rank exit.
    """

    def init_poller(self) -> None:
        """Watch no parent process: ipykernel would read the pid of the notebook's parent from the environment."""
        self.poller = None

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
    config.Completer.use_jedi = False  # the namespace suffices, and jedi's first use takes a second
    config.IPKernelApp.kernel_class = RankKernel
    with _own_profile(ipython_folder):
        app = RankApp(
            config=config,
            connection_file=str(connection_file),
            outstream_class="ddpilot.session.rank.streams.RankStream",
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
