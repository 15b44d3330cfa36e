# SPDX-License-Identifier: Apache-2.0
"""`Loop`'s checkpoint methods: track, save, resume and load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.checkpoint.collective import load_jointly
from ddpilot.data.options import naming_rank
from ddpilot.training.setup import LoopState


class KeepingLoop(LoopState):
    """Saves and restores the state of everything that was prepared or tracked."""

    def track(self, **things: Any) -> None:
        """Save and restore `things` with the checkpoints, each under its keyword's name; not collective.

        Accepts anything with `state_dict` and `load_state_dict` that is not passed to `prepare`, and prepared objects
        to name them: `loop.track(generator=gen)`. Only the state of rank 0 is saved. Raises LoopError for other
        objects.
        """
        with naming_rank(self.rank):
            for name, thing in things.items():
                self._things.add(thing, name)

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint; `metrics` are used to choose the best one. Collective: every rank calls it.

        Within `batches`, it is saved after the current update; in the rest of an epoch, with the checkpoint at the end
        of the epoch; elsewhere at once, and it is on disk on return. Write errors are reported on stderr and do not
        stop the training. Raises LoopError without a `checkpoint_dir`.
        """
        self._saves_by = "user"
        self._keeper.ask(metrics, in_batch=self._updates.batch is not None)

    def resume(self, *, other_data: bool = False) -> bool:
        """Resume from the latest intact checkpoint. True if there is one. Collective.

        `epochs` calls it automatically: call it to have the weights earlier. Restores everything that was prepared or
        tracked, and the position in the data; rank 0 reports the position on stderr when training or an evaluation
        begins. `other_data`: True accepts a dataset of a different length at the start of an epoch. Raises
        CorruptCheckpointError if no checkpoint is intact, and MismatchedCheckpointError, on all ranks and without any
        change, if it belongs to a different run.
        """
        self._saves_by = "user"
        return self._keeper.resume(other_data=other_data)

    def load(self, model: nn.Module, path: str | os.PathLike[str], *, name: str = "model") -> None:
        """Load weights only, from a file or a checkpoint directory, into `model`, on its own device. Collective.

        `path`, `name`: as for `load_weights`. Raises its errors, on all ranks if one of them fails; no model is changed
        then.
        """
        self._keeper.wait()
        load_jointly(model, path, name, self.group)
