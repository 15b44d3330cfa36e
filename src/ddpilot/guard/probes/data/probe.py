# SPDX-License-Identifier: Apache-2.0
"""The data probe: loaders, inputs of DDP models, randomness, losses, and reductions by the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.forwards import ForwardEyes
from ddpilot.guard.probes.data.loaders import LoaderEyes
from ddpilot.guard.probes.data.losses import LossEyes
from ddpilot.guard.probes.data.position import Position
from ddpilot.guard.probes.data.random_draws import DrawEyes
from ddpilot.guard.probes.data.reductions import ReductionEyes


class DataProbe:
    """Notes passes over loaders, fingerprints of batches, states of generators, and non-finite values."""

    name = "data, randomness and losses"

    def install(self, notes: Notes) -> Callable[[], None]:
        """Install the probe, see `Probe.install`."""
        position = Position()
        loaders = LoaderEyes(notes, position)
        draws = DrawEyes(notes, loaders)
        loaders.starts_workers, loaders.has_worker_notes = draws.share, draws.collect
        eyes: tuple[Any, ...] = (loaders, draws, ForwardEyes(notes, position))
        eyes += (LossEyes(notes, position), ReductionEyes(notes, position))
        undo = [step for one in eyes for step in one.install()]

        def uninstall() -> None:
            while undo:
                undo.pop()()

        return uninstall
