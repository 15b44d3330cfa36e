# SPDX-License-Identifier: Apache-2.0
"""`GarbageCollection`: runs Python's garbage collector on all ranks at the same time."""

from __future__ import annotations

import gc

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.logs import check_every
from ddpilot.trainer.run import Run


class GarbageCollection(Callback):
    """Run Python's garbage collector only after every `every` updates (default 200) and after each epoch.

    By default, each rank collects at a different time. A collection takes tenths of a second in a large program, while
    all other ranks wait in the next all-reduce of gradients. With this callback all ranks collect after the same
    update: the young generations after updates, everything after an epoch. Objects that existed before the fit
    (libraries, the model) are frozen, so that a collection takes milliseconds. The collector's previous state is
    restored afterwards. Raises LoopError for `every` below 1.
    """

    ranks = "all"

    def __init__(self, *, every: int = 200) -> None:
        self._every = check_every("GarbageCollection", every)
        self._was_enabled: bool | None = None
        self._has_frozen = False

    def on_fit_start(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        # Otherwise other code has frozen objects, and has to unfreeze them.
        self._has_frozen = gc.get_freeze_count() == 0
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

    def _restore(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled, self._has_frozen = None, False
