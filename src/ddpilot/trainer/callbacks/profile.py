# SPDX-License-Identifier: Apache-2.0
"""`Profile`: shows where the time of the updates of a fit goes, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ddpilot.errors import RecordError
from ddpilot.profiler.phases import Phases
from ddpilot.profiler.pictures.figures import plot_profile
from ddpilot.profiler.pictures.profile_page import render_page
from ddpilot.profiler.running import RunningProfile
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Profile(Callback):
    """Measure every update of a fit on all ranks, and show at its end where the time goes and what to change.

    `path`: file for the report with pictures, which rank 0 writes into an existing folder; None: only the text is
    shown. The first four updates are left out. With fewer than six updates, a line reports that there are too few. At
    the end of the fit the ranks exchange their measurements in one collective.

    After the fit, `summary` is the text, `plot()` returns a matplotlib figure, and `to_html(path)` writes the report. A
    notebook shows the callback as its report.
    """

    ranks = "all"

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._running: RunningProfile | None = None
        self.summary = ""
        """The text of one screen; empty before the end of a fit."""
        self.report = ""
        """The report with its pictures, as HTML; empty before the end of a fit."""
        self.plotted: dict[str, Any] = {}
        """What `plot` draws: ranks, first update, and tensors [ranks, updates, shares] and [ranks, updates]."""

    def to_html(self, path: str | Path, *, title: str = "Profile") -> None:
        """Write the report of the last fit to `path`. Raises RecordError if there is none."""
        self._check("writing the report")
        Path(path).write_text(render_page(title, self.report), "utf-8")

    def plot(self) -> Figure:
        """Return a matplotlib figure of the last fit. Raises RecordError if there is none, or without matplotlib."""
        self._check("plotting")
        seconds, arrivals_s = (self.plotted[name].double().numpy() for name in ("seconds", "arrivals_s"))
        phases = Phases(
            ranks=tuple(self.plotted["ranks"]),
            seconds=seconds,
            arrivals_s=arrivals_s,
            num_samples=numpy.zeros(arrivals_s.shape, dtype=int),
            first_update=self.plotted["first_update"],
            by_site={},
        )
        return plot_profile(phases, self.summary.partition("\n")[0])

    def _check(self, did: str) -> None:
        if not self.report:
            fix = "Fit with this callback for 6 updates or more"
            raise RecordError(did, found="no fit has been profiled", fix=fix)

    def _repr_html_(self) -> str | None:
        return self.report or None

    def _keep(self, profile: RunningProfile) -> None:
        """Keep what is shown after the fit, as values that are copied to the notebook's callback."""
        phases = profile.profile.phases
        self.summary, self.report = profile.summary, profile._repr_html_()
        self.plotted = {
            "ranks": list(phases.ranks),
            "first_update": phases.first_update,
            "seconds": torch.from_numpy(phases.seconds).float(),
            "arrivals_s": torch.from_numpy(phases.arrivals_s).float(),
        }

    def on_fit_start(self, run: Run) -> None:
        self.summary, self.report, self.plotted = "", "", {}
        self._running = run.loop.profile()
        self._running.__enter__()

    def on_fit_end(self, run: Run) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.__exit__(None, None, None)
        if not running.absence:
            self._keep(running)
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
