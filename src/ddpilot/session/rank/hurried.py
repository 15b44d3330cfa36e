# SPDX-License-Identifier: Apache-2.0
"""Time limit for code in the main thread, so that formatting a traceback cannot delay the error report."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class TooSlow(BaseException):
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
def hurried(limit_s: float) -> Iterator[None]:
    """Raise TooSlow in the body, once, after `limit_s` seconds or on SIGINT. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def enough(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise TooSlow

    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(limit_s, signal.raise_signal, (signal.SIGINT,))
    timer.daemon = True
    try:
        try:
            signal.signal(signal.SIGINT, enough)
            timer.start()
            yield
        finally:
            is_over = True
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # after this it sends no signal
        signal.signal(signal.SIGINT, before)
