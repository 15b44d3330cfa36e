# SPDX-License-Identifier: Apache-2.0
"""Measure the updates that a block of code makes on this rank: a cell, or the body of a `with` statement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.hook import install
from ddpilot.profiler.rank.probe import PhaseProbe


def start_recording(folder: Path, rank: int, models: Iterable[DistributedDataParallel]) -> Callable[[], None]:
    """Record the time of updates into `folder` until the function that is returned is called.

    `models`: those that exist already.
    """
    make_probe = functools.partial(PhaseProbe, folder, rank, models)
    functools.update_wrapper(make_probe, PhaseProbe, updated=())
    return install(folder / f"rank{rank}.journal", rank=rank, probes=(make_probe,))
