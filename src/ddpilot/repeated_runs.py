# SPDX-License-Identifier: Apache-2.0
"""Run a script or function again and again to measure or compare it: silently, watched, each run up to a limit.

Ranks are forked from a process that has imported torch: `ddpilot verify` and `ddpilot tune` run a program many times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ddpilot.errors import WatchError
from ddpilot.launcher import Launcher
from ddpilot.launching.observer import LaunchObserver
from ddpilot.output.writer import Output
from ddpilot.watch.companion import Watcher
from ddpilot.watch.options import WatchOptions


@dataclass(frozen=True, kw_only=True)
class RepeatedLauncher(Launcher):
    """A launcher whose ranks also call `hooks`. Shows nothing."""

    is_repeated: ClassVar[bool] = True
    output: Output = "silent"
    hooks: tuple[str, ...] = ()
    run_limit_s: float | None = None
    """Seconds after which the watch ends a run, with the findings about its ranks; None: never."""

    def _make_observer(self, name: str, count: int) -> LaunchObserver:
        return _LimitedWatcher(self, name, count, more_hooks=self.hooks, limit_s=self.run_limit_s)


class _LimitedWatcher(Watcher):
    """The watch of a run, which prints nothing."""

    def __init__(self, options: WatchOptions, name: str, *args: Any, limit_s: float | None, **kwargs: Any) -> None:
        super().__init__(options, name, *args, **kwargs)
        self._timer = threading.Timer(limit_s, self._end_run, (name, limit_s)) if limit_s is not None else None

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin to observe the ranks, and to count their time."""
        super().begin(*args, **kwargs)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def _end_run(self, name: str, limit_s: float) -> None:
        self._error = self._error or WatchError(
            f"running `{name}`",
            found=f"its ranks had not ended after {limit_s:.3g} s",
            fix="Raise `timeout_s` if they were only slow",
            findings=self._find_all() if self._observer is not None else (),
        )
        self._wake()

    def take(self, note: Callable[[str], None]) -> WatchError | None:  # noqa: ARG002
        """Return the error with which the run is to end, if any."""
        return super().take(lambda _: None)

    def end(self, is_clean: bool) -> None:
        """Close the watch."""
        if self._timer is not None:
            self._timer.cancel()
        super().end(is_clean)
