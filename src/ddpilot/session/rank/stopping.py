# SPDX-License-Identifier: Apache-2.0
"""The stop button in a rank, also at the moment at which it forks a worker of a `DataLoader`, or takes a lock."""

from __future__ import annotations

import multiprocessing.queues
import multiprocessing.synchronize
import os
import queue
import signal
import threading
from types import FrameType

from tornado.ioloop import IOLoop

_AGAIN_AFTER_S = 0.005
_MAX_HELD_BACK = 30
"""How often a stop is held back for code that takes locks; it may as well be waiting there, for ever."""

_LOCKING_FILES = frozenset(
    module.__file__ for module in (multiprocessing.queues, multiprocessing.synchronize, queue, threading)
)
_NUM_FRAMES = 3


def is_taking_lock(frame: FrameType | None) -> bool:
    """Whether a KeyboardInterrupt in `frame` could leave a lock of the standard library taken for good.

    A `Condition` is entered by Python code, and what is raised between its lock being taken and the `with` block being
    entered releases nothing: the next `put` into that queue, such as the one that ends a worker, waits for ever.
    """
    for _ in range(_NUM_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename in _LOCKING_FILES:
            return True
        frame = frame.f_back
    return False


class StopHandler:
    """A SIGINT handler that raises KeyboardInterrupt while it is armed.

    During a fork, or while a lock is being taken, it does so as soon as that is done. Before it is armed a stop waits:
    raised outside the part that answers for it, it would end the cell without a reply. Afterwards it is dropped.

    Python runs functions of libraries before and after a fork, prints what they raise and goes on: a stop that comes
    then would be lost. `loop`, of another thread, sends it again. Made once in a process: hooks of forks are for good.
    """

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._is_forking = False
        self._is_armed = False
        self._is_waiting = False
        self._num_held_back = 0
        self._woken, self._waker = os.pipe()
        loop.add_callback(loop.add_handler, self._woken, self._send_again, IOLoop.READ)
        # The hooks that were registered before run between these two.
        os.register_at_fork(before=self._begin, after_in_parent=self._end, after_in_child=self._end)

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if not self._is_armed:
            self._is_waiting = True
            return
        is_own = frame is not None and frame.f_code in (StopHandler._begin.__code__, StopHandler._end.__code__)
        is_locking = is_taking_lock(frame) and self._num_held_back < _MAX_HELD_BACK
        if not self._is_forking and not is_own and not is_locking:
            self._num_held_back = 0
            raise KeyboardInterrupt
        self._num_held_back += is_locking
        os.write(self._waker, b"x")

    def take_over(self) -> None:
        """Take SIGINT from now on, not armed. What came before is forgotten: it was for something that is over."""
        self._is_armed = self._is_waiting = False
        self._num_held_back = 0
        signal.signal(signal.SIGINT, self)

    def arm(self) -> None:
        """Raise KeyboardInterrupt from now on; now, if a stop has come since `take_over`."""
        self._is_armed = True
        if self._is_waiting:
            self._is_waiting = False
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """Raise no longer."""
        self._is_armed = False

    def _begin(self) -> None:
        self._is_forking = True

    def _end(self) -> None:
        self._is_forking = False

    def _send_again(self, woken: int, _events: int) -> None:
        os.read(woken, 1)
        self._loop.call_later(_AGAIN_AFTER_S, os.kill, os.getpid(), signal.SIGINT)
