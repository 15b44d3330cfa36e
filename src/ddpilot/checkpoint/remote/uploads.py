# SPDX-License-Identifier: Apache-2.0
"""`Uploads`: a queue of checkpoints that a background thread uploads; what failed is tried again and reported."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress

from ddpilot.errors import CheckpointError

MAX_QUEUED = 2
"""Number of checkpoints that are uploaded or wait for it; a save waits while there are that many."""
_PATIENCE_S = 5.0
"""Seconds of waiting after which it is reported."""


def at_exit(call: Callable[[], object]) -> None:
    """Call `call` when the interpreter exits, while threads, which backends need for uploads, can still be started."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the interpreter exits already
        register(call)


class Uploads:
    """Checkpoints to upload, by name, one after the other, in a thread that ends with the last one.

    `upload`: uploads one; raises CheckpointError. `report`: called, on the thread that waits or polls, with messages.
    """

    def __init__(self, upload: Callable[[str], None], url: str, report: Callable[[str], None]) -> None:
        self._upload = upload
        self._url = url
        self._report = report
        self._condition = threading.Condition()
        self._queue: list[str] = []
        self._failed: dict[str, CheckpointError] = {}
        self._notes: list[str] = []
        self._reported: set[str] = set()
        self._is_running = False

    @property
    def queued(self) -> list[str]:
        """Names of the checkpoints that are being uploaded or wait for it, oldest first."""
        with self._condition:
            return list(self._queue)

    @property
    def failed(self) -> dict[str, CheckpointError]:
        """The checkpoints whose upload failed, by name, with the errors."""
        with self._condition:
            return dict(self._failed)

    def add(self, name: str) -> None:
        """Upload the checkpoint `name` in the background."""
        with self._condition:
            self._failed.pop(name, None)
            self._queue.append(name)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="ddpilot-upload").start()

    def note(self, text: str) -> None:
        """Report `text` when the main thread polls or waits next."""
        self._notes.append(text)

    def poll(self) -> None:
        """Report failures so far, without waiting."""
        while self._notes:
            self._report(self._notes.pop(0))

    def wait_for_room(self) -> None:
        """Wait while too many checkpoints are queued, which is reported."""
        text = (
            f"training waits for uploads to {self._url}: {{num}} checkpoints are not there yet. This is reported once; "
            "save less often, or to a faster store"
        )
        self._wait(MAX_QUEUED - 1, text, after_s=0.0)

    def drain(self) -> bool:
        """Wait for all uploads, after trying failed ones again; report failures. True if all are uploaded."""
        for name in list(self._failed):
            self.add(name)
        self._wait(0, f"waiting for uploads to {self._url}: {{num}} to go", after_s=_PATIENCE_S)
        self.poll()
        return not self._failed

    def forget(self, name: str) -> None:
        """Do not try a failed upload again."""
        with self._condition:
            self._failed.pop(name, None)

    def _wait(self, num_allowed: int, text: str, after_s: float) -> None:
        def has_room() -> bool:
            return len(self._queue) <= num_allowed

        with self._condition:
            if not self._condition.wait_for(has_room, timeout=after_s):
                if text not in self._reported:
                    self._reported.add(text)
                    self._report(text.replace("{num}", str(len(self._queue))))
                self._condition.wait_for(has_room)
            if num_allowed == 0:
                self._condition.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.notify_all()
                if not self._queue:
                    self._is_running = False
                    return
                name = self._queue[0]
            failure = self._try(name)
            with self._condition:
                self._queue.pop(0)
                if failure is not None:
                    self._failed[name] = failure
                elif self._failed and not self._queue:  # the store can be reached again
                    self._queue.append(next(iter(self._failed)))
                    del self._failed[self._queue[0]]

    def _try(self, name: str) -> CheckpointError | None:
        try:
            self._upload(name)
        except CheckpointError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
            failure = CheckpointError(f"uploading {name} to {self._url}", found=f"{type(error).__name__}: {error}")
        else:
            return None
        self.note(f"{name} was not uploaded: {str(failure).rstrip('.')}. The upload is tried again")
        return failure
