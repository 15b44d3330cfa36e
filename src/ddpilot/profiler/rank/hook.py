# SPDX-License-Identifier: Apache-2.0
"""Launch hook that records where a rank's time goes. Imports torch only where `PROFILE_VARIABLE` is set."""

from __future__ import annotations

import atexit
from pathlib import Path

from ddpilot.guard.hook import install
from ddpilot.module_names import NVTX_PROBE, PROFILE_PROBE
from ddpilot.profiler.spans_file import PROFILE_VARIABLE, RankOptions
from ddpilot.record.hook import RankStart


def start(rank_start: RankStart) -> None:
    """Record the rank's time until it exits. An error is reported in one line on stderr, and the rank continues."""
    folder = rank_start.environ.get(PROFILE_VARIABLE)
    if folder:
        journal = Path(folder) / f"rank{rank_start.rank}.journal"
        marks = (NVTX_PROBE,) if RankOptions.from_environ(rank_start.environ).nvtx else ()
        atexit.register(install(journal, rank=rank_start.rank, probes=(PROFILE_PROBE, *marks)))
