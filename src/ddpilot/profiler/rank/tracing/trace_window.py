# SPDX-License-Identifier: Apache-2.0
"""Record a few updates of this rank with torch.profiler: every operator, as a file that Perfetto opens."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ddpilot.profiler.rank.node_clocks import name_clock
from ddpilot.profiler.spans_file import RankOptions
from ddpilot.profiler.traces import CLOCK_KEY, trace_path


class TraceWindow:
    """torch.profiler for some updates after the first ones; it slows these down, so that phases leave them out."""

    def __init__(self, folder: Path, rank: int, options: RankOptions) -> None:
        self._folder, self._rank, self._options = folder, rank, options
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=options.wait, warmup=options.warm_up, active=options.active, repeat=options.repeat),
            on_trace_ready=self._write,
            profile_memory=options.memory,
        )
        self._num_updates = self._num_written = 0
        self._last_s = 0.0
        self._durations_s: dict[bool, list[float]] = {True: [], False: []}
        self._profile.start()

    def _write(self, done: Any) -> None:
        """Write the trace of a cycle."""
        done.export_chrome_trace(str(trace_path(self._folder, self._rank, self._num_written)))
        self._num_written += 1

    def _note_clock(self) -> None:
        """Compare the wall clock, of which a trace's times are, with CLOCK_MONOTONIC; while updates are recorded."""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        about = json.dumps({"name": name_clock(), "wall_minus_monotonic_ns": ahead_ns})
        self._profile.add_metadata_json(CLOCK_KEY, about)

    @property
    def _is_kept(self) -> bool:
        """True in updates whose trace is kept."""
        options = self._options
        cycle, place = divmod(self._num_updates, options.wait + options.warm_up + options.active)
        return cycle < options.repeat and place >= options.wait + options.warm_up

    @property
    def is_recording(self) -> bool:
        """True while updates are slower because they are recorded."""
        options = self._options
        cycle, place = divmod(self._num_updates, options.wait + options.warm_up + options.active)
        if cycle == 0 or place:
            return cycle < options.repeat and place >= options.wait
        return cycle <= options.repeat  # in the first update after a cycle its trace is written

    def end_update(self) -> None:
        """Call at the end of each update. The file is written when the last one has ended."""
        now_s = time.perf_counter()
        if self._num_updates:
            self._durations_s[self.is_recording].append(now_s - self._last_s)
        if self._is_kept:
            self._note_clock()
        self._num_updates += 1
        self._profile.step()
        self._last_s = now_s

    @property
    def slow_down(self) -> float | None:
        """How many times as long recorded updates took as the others; None if there were none of either."""
        recorded_s, others_s = self._durations_s[True], self._durations_s[False]
        return statistics.median(recorded_s) / statistics.median(others_s) if recorded_s and others_s else None

    def stop(self) -> None:
        """Stop, and write what was recorded if the program ends within the window."""
        self._profile.stop()
