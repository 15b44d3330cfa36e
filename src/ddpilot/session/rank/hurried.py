# SPDX-License-Identifier: Apache-2.0
"""What is worth some time and no more of it: colours for a traceback, while the session waits to hear of the error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class TooSlow(BaseException):
    """It took too long, or a person or the session wants the rank back. No `Exception`: nobody else handles it."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, SIGINT does nothing: what it would end has failed already."""
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
    """Raise TooSlow inside, once, after `limit_s` seconds or at a SIGINT. Without effect outside the main thread."""
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
            timer.join()  # it sends nothing any more
        signal.signal(signal.SIGINT, before)
