# SPDX-License-Identifier: Apache-2.0
"""Main function of a session's rank: runs a kernel until the session ends."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from tornado import ioloop

from ddpilot.session.protocol.entry_points import KernelStart
from ddpilot.session.rank.app import make_app
from ddpilot.session.rank.debugging import use_pdb
from ddpilot.session.rank.interrupts import StopHandler
from ddpilot.session.rank.misplaced import register_misplaced
from ddpilot.session.rank.namespace import fill_namespace
from ddpilot.session.rank.requests import Requests
from ddpilot.session.rank.workers import end_workers_soon


def serve_kernel(start: KernelStart) -> None:
    """Run a Jupyter kernel on the session's sockets until the session asks it to end."""
    rank = int(os.environ["RANK"])
    app = make_app(start.connection_file(rank), start.folder / f"{start.stem(rank)}.ipython")
    kernel = app.kernel
    space = fill_namespace(vars(sys.modules["__main__"]), start)
    kernel.requests = Requests(kernel, space, start.parcel_socket(rank))
    kernel.stop_handler = StopHandler(app.control_thread.io_loop)
    _wake_on_signals()
    end_workers_soon()
    use_pdb()
    register_misplaced(kernel.shell)
    gc.collect()
    gc.freeze()  # existing objects are permanent: collections after cells then skip them
    app.start()
    space.finish()


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
