# SPDX-License-Identifier: Apache-2.0
"""Record a few updates of this rank with torch.profiler: every operator, as a file that Perfetto opens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ddpilot.profiler.traces import trace_path

WAIT, WARM_UP, ACTIVE = 3, 1, 5
"""Updates that are left out, that are recorded and dropped, and that are kept."""


class TraceWindow:
    """torch.profiler for some updates after the first ones; it slows these down, so that phases leave them out."""

    def __init__(self, folder: Path, rank: int) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace_path(folder, rank))),
        )
        self._num_updates = 0
        self._profile.start()

    @property
    def is_recording(self) -> bool:
        """True while updates are slower because they are recorded."""
        return WAIT <= self._num_updates < WAIT + WARM_UP + ACTIVE + 1

    def end_update(self) -> None:
        """Call at the end of each update. The file is written when the last one has ended."""
        self._num_updates += 1
        self._profile.step()

    def stop(self) -> None:
        """Stop, and write what was recorded if the program ends within the window."""
        self._profile.stop()
