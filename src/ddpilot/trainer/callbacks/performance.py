# SPDX-License-Identifier: Apache-2.0
"""`Timers`, `Profile` and `GarbageCollection`: measure where the time of a fit goes, and lose less of it."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpilot.errors import LoopError, RecordError
from ddpilot.group.device import current_event, runs_behind
from ddpilot.profiler.phases import Phases
from ddpilot.profiler.pictures.figures import plot_profile
from ddpilot.profiler.pictures.profile_page import render_page
from ddpilot.profiler.running import RunningProfile
from ddpilot.record.accelerator import is_capturing
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.logs import check_every
from ddpilot.trainer.run import Run
from ddpilot.training.models.ddp import unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PARTS = ("data", "forward", "update", "save", "evaluate")
_REPORTED_SHARE, _REPORTED_S = 0.05, 0.1
"""Smallest difference that is reported, as a share of the epoch and in seconds."""


class Timers(Callback):
    """Time the parts of each epoch on every rank, and report slow ranks on rank 0.

    - "data": waiting for the loader.
    - "forward": forward passes in training.
    - "update": the rest of training: backward, all-reduce of gradients, optimizer and callbacks.
    - "save": waiting for checkpoints in the epoch, and for the one at the end of the previous epoch.
    - "evaluate": the validation.

    All ranks wait in "update" for the slowest rank, which takes longer in "data" or "forward". A rank is reported as
    slow if its "data" plus "forward" is more than `slow` times (default 1.3) the median of the other ranks', and the
    difference is at least 5 % of the epoch and 0.1 s. On a GPU, "forward" is device time, measured without
    synchronization in the epoch.

    The epoch's row has {"data": ...} under "time": seconds on the rank with the maximum. If `validate_every` counts
    updates, its intervals are timed instead of epochs. Each epoch or interval costs one small collective. `say`: print
    a line per epoch (default True). Raises LoopError unless `slow` is above 1.
    """

    ranks = "all"

    def __init__(self, *, slow: float = 1.3, say: bool = True) -> None:
        if not slow > 1:
            raise LoopError("making Timers", found=f"`slow` is {slow}", fix="Give a factor above 1.")
        self._slow = slow
        self._say = say
        self._clock = ForwardClock(torch.device("cpu"))
        self._handles: list[RemovableHandle] = []
        self._begin_s = self._trained_s = self._evaluated_s = self._data_s = 0.0
        self._is_timing = False
        self._in_epoch_s = self._save_s = 0.0
        self.rows: list[dict[str, Any]] = []
        """{"epoch", "data", "forward", "update", "save", "evaluate"} for each epoch: lists with the seconds of each
        rank. For each interval also {"number"}, the number of updates at its end."""

    def on_fit_start(self, run: Run) -> None:
        by_updates, self._is_timing = run.validate_every.counts_updates, False
        self.rows = [
            row for row in self.rows if (row.get("number", 0) <= run.update if by_updates else row["epoch"] < run.epoch)
        ]
        device = run.loop.device
        self._clock = ForwardClock(device)
        self._save_s = run.loop.save_s
        models = run.wrapped.values() if isinstance(run.wrapped, dict) else [run.wrapped]
        for model in map(unwrap, models):
            self._handles.append(model.register_forward_pre_hook(self._begin_forward))
            self._handles.append(model.register_forward_hook(self._end_forward))

    def on_epoch_start(self, run: Run) -> None:
        if not self._is_timing:
            self._start(run)

    def _start(self, run: Run) -> None:
        self._is_timing = True
        self._begin_s = self._trained_s = self._evaluated_s = time.perf_counter()
        self._data_s, self._in_epoch_s = run.loop.data_s, run.loop.save_s
        self._clock.take_s()

    def on_update_end(self, run: Run) -> None:
        self._trained_s = self._evaluated_s = time.perf_counter()

    def on_evaluate_end(self, run: Run) -> None:
        self._evaluated_s = time.perf_counter()

    def on_epoch_end(self, run: Run) -> None:
        if not run.validate_every.counts_updates:
            self._end(run, {"epoch": run.epoch})
            self._is_timing = False

    def on_interval_end(self, run: Run) -> None:
        self._end(run, {"epoch": run.epoch, "number": run.update})
        self._start(run)

    def _end(self, run: Run, where: dict[str, int]) -> None:
        data_s, forward_s = run.loop.data_s - self._data_s, self._clock.take_s()
        rest_s = self._trained_s - self._begin_s - data_s - forward_s - (run.loop.save_s - self._in_epoch_s)
        save_s, self._save_s = run.loop.save_s - self._save_s, run.loop.save_s
        own = (data_s, forward_s, max(rest_s, 0.0), save_s, self._evaluated_s - self._trained_s)
        by_part = zip(*run.loop.group.all_gather_object(own), strict=True)
        row = {part: list(seconds) for part, seconds in zip(PARTS, by_part, strict=True)}
        run.metrics["time"] = {part: max(seconds) for part, seconds in row.items()}
        self.rows.append({**where, **row})
        if self._say:
            run.loop.print(render_times(self.rows[-1], self._slow), flush=True)

    def on_fit_end(self, run: Run) -> None:
        self._remove()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def _begin_forward(self, model: nn.Module, _inputs: Any) -> None:
        if model.training:  # evaluations run the same model
            self._clock.begin()

    def _end_forward(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        if model.training:
            self._clock.end()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def find_slow(row: dict[str, Any], factor: float) -> list[tuple[int, float]]:
    """Return ranks whose data and forward took over `factor` times the median of the other ranks', and their ratios."""
    least_s = max(sum(max(row[part]) for part in PARTS) * _REPORTED_SHARE, _REPORTED_S)
    own = [data + forward for data, forward in zip(row["data"], row["forward"], strict=True)]
    found = []
    for rank, seconds in enumerate(own):
        others = own[:rank] + own[rank + 1 :]
        median = statistics.median(others) if others else seconds
        if seconds > factor * median and seconds - median >= least_s:
            found.append((rank, seconds / median if median else float("inf")))
    return found


def render_times(row: dict[str, Any], factor: float) -> str:
    """Return a line such as "epoch 0: data 0.1 s, forward 1.2 s, update 2 s, ...; rank 1 is slow: ..."."""
    parts = ", ".join(f"{part} {max(row[part]):.3g} s" for part in PARTS)
    slow = "".join(
        f"; rank {rank} is slow: data {row['data'][rank]:.3g} s and forward {row['forward'][rank]:.3g} s, "
        f"{times:.2g} times the median of the other ranks"
        for rank, times in find_slow(row, factor)
    )
    where = f"update {row['number']}" if "number" in row else f"epoch {row['epoch']}"
    return f"{where}: {parts}{slow}"


class ForwardClock:
    """Accumulates the time between `begin` and `end` on `device`.

    On an accelerator it is measured by events in its stream; only `take_s` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_late = runs_behind(device)
        self._begin: Any = None
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._total_s = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begin = self._now()

    def end(self) -> None:
        """Stop the clock."""
        if self._begin is not None:
            self._waiting.append((self._begin, self._now()))
            self._begin = None
        # Keeps the deque as short as the device's queue.
        while self._waiting and not (self._is_late and (is_capturing() or not self._waiting[0][1].query())):
            self._add()

    def take_s(self) -> float:
        """Return the seconds accumulated since the last call; waits for the device."""
        while self._waiting:
            self._waiting[0][1].synchronize()
            self._add()
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def _now(self) -> Any:
        return current_event(self._device, enable_timing=True) if self._is_late else time.perf_counter()

    def _add(self) -> None:
        begin, end = self._waiting.popleft()
        self._total_s += begin.elapsed_time(end) / 1e3 if self._is_late else end - begin


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


class GarbageCollection(Callback):
    """Run Python's garbage collector only after every `every` updates (default 200) and after each epoch.

    By default, each rank collects at a different time. A collection takes tenths of a second in a large program, while
    all other ranks wait in the next all-reduce of gradients. With this callback all ranks collect after the same
    update: the young generations after updates, everything after an epoch. Objects that existed before the fit
    (libraries, the model) are frozen, so that a collection takes milliseconds. The collector's previous state is
    restored afterwards. Raises LoopError for `every` below 1.
    """

    ranks = "all"

    def __init__(self, *, every: int = 200) -> None:
        self._every = check_every("GarbageCollection", every)
        self._was_enabled: bool | None = None
        self._has_frozen = False

    def on_fit_start(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        # Otherwise other code has frozen objects, and has to unfreeze them.
        self._has_frozen = gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()
        gc.disable()

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            gc.collect(1)

    def on_epoch_end(self, run: Run) -> None:
        gc.collect()

    def on_fit_end(self, run: Run) -> None:
        self._restore()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled, self._has_frozen = None, False
