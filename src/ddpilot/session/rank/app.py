# SPDX-License-Identifier: Apache-2.0
"""The kernel application of a rank: ipykernel's, without what belongs to a kernel that a person started."""

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

_FLUSH_S = 0.02  # ipykernel holds output back for 0.2 s


class RankApp(IPKernelApp):
    """Connection file in, running kernel out. No heartbeat and no parent poller: the session sees a rank's end."""

    def init_poller(self) -> None:
        """Watch no parent: ipykernel would take the pid of the notebook's own parent from the environment."""
        self.poller = None

    def init_heartbeat(self) -> None:
        """Open no heartbeat channel."""

    def configure_tornado_logger(self) -> None:
        """Leave logging as it is; ipykernel would write to the stream that tornado finds."""
        logging.getLogger("tornado").addHandler(logging.NullHandler())


@contextlib.contextmanager
def _own_profile(folder: Path) -> Iterator[None]:
    """Keep IPython from reading and writing the user's profile."""
    before = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["IPYTHONDIR"]
        if before is not None:
            os.environ["IPYTHONDIR"] = before


def make_app(connection_file: Path, ipython_folder: Path) -> RankApp:
    """A kernel on the sockets that `connection_file` names, ready to `start()`; ``__main__`` is its namespace."""
    main = sys.modules["__main__"]
    config = Config()
    config.HistoryManager.enabled = False  # ranks must not write the user's history
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.cache_size = 0  # `Out` would keep every tensor that a cell ended with
    config.InteractiveShell.enable_tip = False  # choosing its banner would draw from what was seeded
    config.Completer.use_jedi = False  # what the namespace holds is enough, and jedi takes a second at first
    config.IPKernelApp.kernel_class = RankKernel
    with _own_profile(ipython_folder):
        app = RankApp(
            config=config,
            connection_file=str(connection_file),
            outstream_class="ddpilot.session.rank.streams.RankStream",
            capture_fd_output=False,  # the session reads descriptors 1 and 2 itself: a rank's last words come through
            quiet=True,
            user_ns=vars(main),
            log_level=logging.CRITICAL,
        )
        app.initialize([])
    app.kernel.user_module = main
    app.kernel.shell.set_hook("show_in_pager", page.as_hook(page.display_page), 90)  # nobody fetches a pager's text
    sys.modules["__main__"] = main  # IPython has put a module of its own there, with the same dictionary
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, OutStream)
        stream.flush_interval = _FLUSH_S
    return app
