# SPDX-License-Identifier: Apache-2.0
"""`GarbageCollection`: Python's garbage collected on all ranks at once."""

from __future__ import annotations

import gc
from typing import Any

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.values import check_every
from ddpilot.trainer.run import Run


class GarbageCollection(Callback):
    """Collects Python's garbage after each `every` updates (default 200) and each epoch, and at no other time.

    Left to itself each rank collects at a moment of its own, for tenths of a second with a large program, and all
    others wait for it in the next exchange of gradients: with many ranks somebody is always late. Here all ranks do it
    after the same update: the young generations after updates, everything after an epoch. What was there before the fit
    (libraries, the model) is left out, so that a collection takes milliseconds. Afterwards all is as it was before.
    LoopError for `every` below 1.
    """

    ranks = "all"

    def __init__(self, *, every: int = 200) -> None:
        self._every = check_every("GarbageCollection", every)
        self._was_enabled: bool | None = None
        self._has_frozen = False

    def on_fit_start(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        self._has_frozen = gc.get_freeze_count() == 0  # else somebody else has, and it is theirs to undo
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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _restore(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled, self._has_frozen = None, False
