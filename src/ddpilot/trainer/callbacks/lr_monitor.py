# SPDX-License-Identifier: Apache-2.0
"""`LRMonitor`: records the learning rates of updates."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.log_rows import check_every, plain
from ddpilot.trainer.callbacks.stepping import BeforeSteps, label
from ddpilot.trainer.run import Run


class LRMonitor(Callback):
    """Record the learning rate of each parameter group every `every` updates (default 10), on rank 0.

    Records the rate that the update used, not the one that a scheduler set after it. Its name in logs is "lr", "lr.1"
    for a second group, "lr.name" with several optimizers. `also`: further values of the groups, such as "weight_decay".
    Raises LoopError for `every` below 1.
    """

    def __init__(self, *, every: int = 10, also: tuple[str, ...] = ()) -> None:
        self._every = check_every("LRMonitor", every)
        self._names = ("lr", *also)
        self._hooks: BeforeSteps | None = None
        self.rows: list[dict[str, Any]] = []
        """{"update": ..., "lr": ...} for every fit."""

    def on_fit_start(self, run: Run) -> None:
        self.rows = [row for row in self.rows if row["update"] <= run.update]
        self._hooks = BeforeSteps(run, lambda *step: self._look(run, *step))

    def on_update_end(self, run: Run) -> None:
        if run.update % self._every == 0:
            names = [name for name in run.values if name.partition(".")[0] in self._names]
            self.rows.append({"update": run.update, **{name: run.values[name] for name in names}})

    def on_fit_end(self, run: Run) -> None:
        self._remove()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def _look(self, run: Run, name: str, optimizer: Optimizer, update: int) -> None:
        if update % self._every:
            return
        for place, group in enumerate(optimizer.param_groups):
            for what in self._names:
                if what in group:
                    key = label(name, run, what) + (f".{place}" if place else "")
                    run.values[key] = plain(group[what])

    def _remove(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
