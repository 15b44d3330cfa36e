# SPDX-License-Identifier: Apache-2.0
"""The data probe: loaders, inputs of DDP models, randomness, losses, and reductions by the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.forwards import ForwardObserver
from ddpilot.guard.probes.data.loaders import LoaderObserver
from ddpilot.guard.probes.data.losses import LossObserver
from ddpilot.guard.probes.data.position import Position
from ddpilot.guard.probes.data.random_draws import DrawObserver
from ddpilot.guard.probes.data.reductions import ReductionObserver


class DataProbe:
    """Notes passes over loaders, fingerprints of batches, states of generators, and non-finite values."""

    name = "data, randomness and losses"

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        position = Position()
        draws = DrawObserver(notes, position)
        observers: tuple[Any, ...] = (LoaderObserver(notes, position, draws), draws, ForwardObserver(notes, position))
        observers += (LossObserver(notes, position), ReductionObserver(notes, position))
        return [step for one in observers for step in one.install()]
