# SPDX-License-Identifier: Apache-2.0
"""Handle SIGINT in a rank, also while it forks a `DataLoader` worker or acquires a lock."""

from __future__ import annotations

import contextlib
import multiprocessing.queues
import multiprocessing.synchronize
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from tornado.ioloop import IOLoop

_AGAIN_AFTER_S = 0.005
_MAX_HELD_BACK = 30
"""Maximum number of times that an interrupt is delayed for code that acquires locks, which may itself be blocked."""

_LOCKING_FILES = frozenset(
    module.__file__ for module in (multiprocessing.queues, multiprocessing.synchronize, queue, threading)
)
_NUM_FRAMES = 3


def is_taking_lock(frame: FrameType | None) -> bool:
    """True if a KeyboardInterrupt in `frame` could leave a lock of the standard library acquired forever.

    `Condition.__enter__` is Python code, and an exception between acquiring its lock and entering the `with` block
    releases nothing: the next `put` into that queue, such as the one that ends a worker, blocks forever.
    """
    for _ in range(_NUM_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename in _LOCKING_FILES:
            return True
        frame = frame.f_back
    return False


class InterruptHandler:
    """A SIGINT handler that raises KeyboardInterrupt while it is armed.

    During a fork, or while a lock is being acquired, it raises as soon as that is done. Before it is armed, interrupts
    are held back: raised outside the code that handles them, they would end the cell without a reply. After it is
    disarmed, they are dropped.

    Python calls functions that libraries have registered before and after a fork, and prints and ignores their
    exceptions, so that an interrupt would be lost there. `loop`, which runs in a different thread, sends it again.
    Create one handler per process: fork hooks cannot be removed.
    """

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._is_forking = False
        self._is_armed = False
        self._is_waiting = False
        self._num_held_back = 0
        self._woken, self._waker = os.pipe()
        loop.add_callback(loop.add_handler, self._woken, self._resend, IOLoop.READ)
        # Hooks that were registered earlier run between these two.
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork)

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if not self._is_armed:
            self._is_waiting = True
            return
        cls = InterruptHandler
        is_own = frame is not None and frame.f_code in (cls._before_fork.__code__, cls._after_fork.__code__)
        is_locking = is_taking_lock(frame) and self._num_held_back < _MAX_HELD_BACK
        if not self._is_forking and not is_own and not is_locking:
            self._num_held_back = 0
            raise KeyboardInterrupt
        self._num_held_back += is_locking
        os.write(self._waker, b"x")

    def install(self) -> None:
        """Install the handler, disarmed. Earlier interrupts are discarded, as they were for a previous cell."""
        self._is_armed = self._is_waiting = False
        self._num_held_back = 0
        signal.signal(signal.SIGINT, self)

    def arm(self) -> None:
        """Raise KeyboardInterrupt on SIGINT from now on; raise it now if one arrived since `install`."""
        self._is_armed = True
        if self._is_waiting:
            self._is_waiting = False
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """Stop raising."""
        self._is_armed = False

    def _before_fork(self) -> None:
        self._is_forking = True

    def _after_fork(self) -> None:
        self._is_forking = False

    def _resend(self, woken: int, _events: int) -> None:
        os.read(woken, 1)
        self._loop.call_later(_AGAIN_AFTER_S, os.kill, os.getpid(), signal.SIGINT)


class TimeLimitExpired(BaseException):
    """The time limit expired, or SIGINT was received. Not an `Exception`, so that other code does not catch it."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT in the body: the code that it would stop has already failed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def time_limit(cpu_s: float, limit_s: float) -> Iterator[None]:
    """Raise TimeLimitExpired in the body, once, or on SIGINT. Only in the main thread.

    Raised after `cpu_s` seconds of the CPU time of this process, which a machine under load does not give in `cpu_s`
    seconds, and after `limit_s` seconds at the latest.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False
    ended = threading.Event()

    def expire(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise TimeLimitExpired

    def wait(cpu_until_s: float, until_s: float) -> None:
        while (left_s := min(cpu_until_s - time.process_time(), until_s - time.monotonic())) > 0:
            if ended.wait(max(left_s, 0.01)):
                return
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    until = time.process_time() + cpu_s, time.monotonic() + limit_s
    timer = threading.Thread(target=wait, args=until, daemon=True)
    try:
        try:
            signal.signal(signal.SIGINT, expire)
            timer.start()
            yield
        finally:
            is_over = True
    finally:
        ended.set()
        if timer.ident is not None:
            timer.join()  # after this it sends no signal
        signal.signal(signal.SIGINT, before)
