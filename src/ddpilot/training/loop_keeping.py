# SPDX-License-Identifier: Apache-2.0
"""The verbs of a `Loop` that save, and go on from what was saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.data.options import naming_rank
from ddpilot.training.checkpoint.joint import load_jointly
from ddpilot.training.loop_state import LoopState


class KeepingLoop(LoopState):
    """Checkpoints of everything that was prepared or tracked."""

    def track(self, **things: Any) -> None:
        """Save and restore `things` with the checkpoints, each under its name; not collective.

        Anything with `state_dict` and `load_state_dict` that is not passed to `prepare`, and what is, to name it:
        `loop.track(generator=gen)`. The state of rank 0 is what counts. Raises LoopError.
        """
        with naming_rank(self.rank):
            for name, thing in things.items():
                self._things.add(thing, name)

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Make a checkpoint, with `metrics` to choose the best by. Collective: every rank calls it.

        In `batches` it is made after the update that is under way; in the rest of an epoch when the epoch ends, where
        one is made anyway; elsewhere at once, and it is on the disk on return. What goes wrong on the disk is told on
        stderr and ends nothing. Raises LoopError without a `checkpoint_dir`.
        """
        self._saves_by = "user"
        self._keeper.ask(metrics, in_batch=self._updates.batch is not None)

    def resume(self, *, other_data: bool = False) -> bool:
        """Go on from the latest checkpoint that is whole; whether there is one. Collective.

        `epochs` does it by itself: this is for who wants the weights before it. Everything that was prepared or tracked
        is restored, and the place in the data; rank 0 says on stderr from where when training or an evaluation begins.
        `other_data`: an epoch may begin with a dataset of another length. Raises CorruptCheckpointError where none is
        whole, and MismatchedCheckpointError, on all ranks and with nothing changed, where it is another run's.
        """
        self._saves_by = "user"
        return self._keeper.resume(other_data=other_data)

    def load(self, model: nn.Module, path: str | os.PathLike[str], *, name: str = "model") -> None:
        """Load weights alone, from a file or a directory of checkpoints, into `model`, where it is. Collective.

        `path`, `name`: those of `load_weights`. Raises what it raises, on all ranks where one of them cannot, and no
        model is changed then.
        """
        self._keeper.wait()
        load_jointly(model, path, name, self.group)
