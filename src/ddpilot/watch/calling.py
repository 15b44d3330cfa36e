# SPDX-License-Identifier: Apache-2.0
"""Call the user's `on_finding` in a separate thread, so that a slow function does not delay the watch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ddpilot.findings.finding import Finding
from ddpilot.watch.report import Report

OnFinding = Callable[[Finding], object]


class Caller:
    """Calls `on_finding` with each finding of a report, one call at a time.

    `stop` is called with a report if the function returned ``"stop"`` for one of its findings; `say` is called with a
    line about any exception that the function raised.
    """

    def __init__(self, on_finding: OnFinding, *, stop: Callable[[Report], None], say: Callable[[str], None]) -> None:
        self._on_finding = on_finding
        self._stop = stop
        self._say = say
        self._todo: deque[Report] = deque()
        self._changed = threading.Condition()
        self._is_running = False

    def call(self, report: Report) -> None:
        """Queue `report`: its findings are passed on after those of earlier reports. Returns at once."""
        with self._changed:
            self._todo.append(report)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="ddpilot-on-finding", daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """Wait until the function has returned from all calls, for at most `limit_s`."""
        end_s = time.monotonic() + limit_s
        with self._changed:
            while self._is_running and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                report = self._todo.popleft()
            if "stop" in [self._ask(finding) for finding in report.findings]:
                self._stop(report)

    def _ask(self, finding: Finding) -> object:
        try:
            return self._on_finding(finding)
        except Exception as error:  # noqa: BLE001 - raised by the user's function: reported, and the job continues
            self._say(f"`on_finding` raised {type(error).__name__}: {error}")
            return None
