# SPDX-License-Identifier: Apache-2.0
"""The stop button in a rank, also at the moment at which it forks a worker of a `DataLoader`."""

from __future__ import annotations

import os
import signal
from types import FrameType

from tornado.ioloop import IOLoop

_AGAIN_AFTER_S = 0.005


class StopHandler:
    """A SIGINT handler that raises KeyboardInterrupt, during a fork as soon as that is done.

    Python runs functions of libraries before and after a fork, prints what they raise and goes on: a stop that comes
    then would be lost. `loop`, of another thread, sends it again. Made once in a process: hooks of forks are for good.
    """

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._is_forking = False
        self._woken, self._waker = os.pipe()
        loop.add_callback(loop.add_handler, self._woken, self._send_again, IOLoop.READ)
        # The hooks that were registered before run between these two.
        os.register_at_fork(before=self._begin, after_in_parent=self._end, after_in_child=self._end)

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        is_own = frame is not None and frame.f_code in (StopHandler._begin.__code__, StopHandler._end.__code__)
        if not self._is_forking and not is_own:
            raise KeyboardInterrupt
        os.write(self._waker, b"x")

    def _begin(self) -> None:
        self._is_forking = True

    def _end(self) -> None:
        self._is_forking = False

    def _send_again(self, woken: int, _events: int) -> None:
        os.read(woken, 1)
        self._loop.call_later(_AGAIN_AFTER_S, os.kill, os.getpid(), signal.SIGINT)
