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
    after the same update. The young generations after updates, everything after an epoch. What was on before is on
    again afterwards. LoopError for `every` below 1.
    """

    ranks = "all"

    def __init__(self, *, every: int = 200) -> None:
        self._every = check_every("GarbageCollection", every)
        self._was_enabled: bool | None = None

    def on_fit_start(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
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
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
