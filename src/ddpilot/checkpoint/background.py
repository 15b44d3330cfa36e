# SPDX-License-Identifier: Apache-2.0
"""Runs one task at a time in a background thread and returns its exception to the caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs a task in a thread that ends with it; the interpreter waits for the thread at exit."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._notes: list[str] = []
        self.is_good = True
        """True if the last finished task succeeded, and before the first one."""

    def start(self, task: Callable[[], None]) -> None:
        """Run `task`; the caller must have finished the previous one."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="ddpilot-checkpoint")
        self._future = executor.submit(task)
        executor.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """True if a task has ended and `finish` has not been called since."""
        return self._future is not None and self._future.done()

    def finish(self) -> BaseException | None:
        """Wait for the task and return its exception; None if it succeeded or there is no task."""
        if self._future is None:
            return None
        failure = self._future.exception()
        self.is_good = failure is None
        self._future = None
        return failure

    def fail(self) -> None:
        """Mark the last task as failed, before it was started."""
        self.is_good = False

    def note(self, text: str) -> None:
        """Record a message for the user that is not an error; called by the task."""
        self._notes.append(text)

    def take_notes(self) -> list[str]:
        """Return the recorded messages and clear them."""
        notes, self._notes = self._notes, []
        return notes
