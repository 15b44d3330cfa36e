# SPDX-License-Identifier: Apache-2.0
"""`WaitNotices`: show a notice during a long wait, after 5 s and then every 15 s."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S = 5.0
_EVERY_S = 15.0


class WaitNotices:
    """The notices of one wait, which starts now."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._start_s = time.monotonic()
        self._due_s = _FIRST_S

    @property
    def waited_s(self) -> float:
        """Seconds since the wait started."""
        return time.monotonic() - self._start_s

    def show_if_due(self, text: str) -> None:
        """Show `text` if a notice is due."""
        if self.waited_s >= self._due_s:
            self._due_s = self.waited_s + _EVERY_S
            self._note(text)
