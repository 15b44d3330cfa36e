# SPDX-License-Identifier: Apache-2.0
"""Launch hook that records the updates of a rank. Imports torch only where `SPEC_VARIABLE` is set."""

from __future__ import annotations

import atexit
from pathlib import Path

from ddpilot.diagnose.updates.record import SPEC_VARIABLE, RecordSpec
from ddpilot.guard.hook import install
from ddpilot.module_names import UPDATE_PROBE
from ddpilot.record.hook import RankStart


def start(rank_start: RankStart) -> None:
    """Change what the specification of the run changes, and record updates until the rank exits.

    An error in recording is reported in one line on stderr, and the rank continues.
    """
    folder = rank_start.environ.get(SPEC_VARIABLE)
    if not folder:
        return
    from ddpilot.diagnose.updates.changes import apply_changes

    apply_changes(RecordSpec.read(Path(folder)))
    stop = install(Path(folder) / f"rank{rank_start.rank}.journal", rank=rank_start.rank, probes=(UPDATE_PROBE,))
    atexit.register(stop)
