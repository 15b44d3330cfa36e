# SPDX-License-Identifier: Apache-2.0
"""One task at a time on a thread of its own; what it raises is handed over, never lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs a task in a thread that ends with it; the interpreter's own end waits for it."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._notes: list[str] = []
        self.is_good = True
        """Did the last finished task end well? True before the first."""

    def start(self, task: Callable[[], None]) -> None:
        """Run `task`; the caller has finished the one before."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="ddpilot-checkpoint")
        self._future = executor.submit(task)
        executor.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Is there an end that `finish` has not been told of?"""
        return self._future is not None and self._future.done()

    def finish(self) -> BaseException | None:
        """Wait for the task and return what it raised; None where it ended well, or where there is none."""
        if self._future is None:
            return None
        failure = self._future.exception()
        self.is_good = failure is None
        self._future = None
        return failure

    def fail(self) -> None:
        """Remember that the last task failed before it was begun."""
        self.is_good = False

    def note(self, text: str) -> None:
        """From the task: something to tell the user that is no failure."""
        self._notes.append(text)

    def take_notes(self) -> list[str]:
        """The notes so far, once."""
        notes, self._notes = self._notes, []
        return notes
