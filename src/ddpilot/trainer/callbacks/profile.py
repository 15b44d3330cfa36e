# SPDX-License-Identifier: Apache-2.0
"""`Profile`: shows where the time of the updates of a fit goes, on all ranks."""

from __future__ import annotations

from pathlib import Path

from ddpilot.profiler.running import RunningProfile
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import Run


class Profile(Callback):
    """Measure every update of a fit on all ranks, and show at its end where the time goes and what to change.

    `path`: file for the report with its pictures, written by rank 0 into an existing folder; None: only the text is
    shown. At the end of the fit the ranks exchange what they have measured, in one collective. The first four updates
    are left out; for fewer than six updates a line says that there are too few.
    """

    ranks = "all"

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._running: RunningProfile | None = None
        self.summary = ""
        """The text of one screen; empty before the end of a fit."""

    def on_fit_start(self, run: Run) -> None:
        self._running = run.loop.profile()
        self._running.__enter__()

    def on_fit_end(self, run: Run) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.__exit__(None, None, None)
        self.summary = "" if running.absence else running.summary
        run.loop.print(running)
        if self._path is not None and run.loop.rank == 0:
            try:
                running.to_html(self._path)
            except OSError as error:  # what has been trained is not lost for it
                run.loop.print(f"the report was not written to {self._path}: {error.strerror}")

    def on_exception(self, run: Run, error: BaseException) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(type(error), error, error.__traceback__)
