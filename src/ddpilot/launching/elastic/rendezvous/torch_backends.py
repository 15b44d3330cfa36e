# SPDX-License-Identifier: Apache-2.0
"""Wait in a thread for torch's rendezvous backends, whose C++ calls block signals and show no progress."""

from __future__ import annotations

import importlib.metadata
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ddpilot.errors import LaunchError, did_you_mean

Result = TypeVar("Result")

FIRST_NOTICE_S = 5.0
"""Seconds of waiting after which a notice is shown."""

_NOTICE_EVERY_S = 15.0
_PAUSE_S = 0.1

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_BACKEND_ENTRIES = "torchrun.handlers"  # entry point group in which torch looks for other packages' backends


class Waiter(Generic[Result]):
    """Runs `call` in a thread, so that a signal interrupts the wait for it.

    `note` shows a notice after 5 s and then every 15 s; `describe` returns its text for the seconds waited.
    """

    def __init__(
        self, call: Callable[[], Result], note: Callable[[str], None], describe: Callable[[float], str]
    ) -> None:
        self._note = note
        self._describe = describe
        self._answer: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue()
        self._call = call

    def wait(self) -> Result:
        """Return or raise what `call` does. If a signal handler raises, the thread is abandoned."""
        threading.Thread(target=self._run, name="ddpilot-rendezvous", daemon=True).start()
        start, noted_s = time.monotonic(), FIRST_NOTICE_S
        while True:
            try:
                result, error = self._answer.get(timeout=_PAUSE_S)
            except queue.Empty:
                waited_s = time.monotonic() - start
                if waited_s >= noted_s:
                    noted_s = waited_s + _NOTICE_EVERY_S
                    self._note(self._describe(waited_s))
                continue
            if error is not None:
                raise error
            return result  # type: ignore[return-value]  # None only where `call` returns it

    def _run(self) -> None:
        try:
            result = self._call()
        except BaseException as error:  # raised by `wait`
            self._answer.put((None, error))
        else:
            self._answer.put((result, None))


def check_backend(name: str) -> None:
    """Raise LaunchError if torch has no rendezvous backend of that name, including those of installed packages."""
    known = [*_BACKENDS, *sorted(entry.name for entry in importlib.metadata.entry_points(group=_BACKEND_ENTRIES))]
    if name not in known:
        guess = did_you_mean(name, known, show=str)
        fix = f"{guess} Backends are {', '.join(known[:-1])} and {known[-1]}; static is ddpilot's".lstrip()
        raise LaunchError("reading --rdzv-backend", found=f"{name!r}", fix=fix)
