# SPDX-License-Identifier: Apache-2.0
"""`WandbLog`: logs to Weights & Biases."""

from __future__ import annotations

from typing import Any

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.log_rows import RowLog, numbers
from ddpilot.trainer.run import Run


class WandbLog(RowLog):
    """Log to Weights & Biases on rank 0, every `every` updates (default 50) and after each epoch, by update number.

    `options` are passed to `wandb.init`, such as `project="..."` or `mode="offline"`. A run that resumes from a
    checkpoint, or fits again, continues the same W&B run. Raises LoopError, on all ranks, if wandb is not installed,
    and for `every` below 1.
    """

    def __init__(self, *, every: int = 50, **options: Any) -> None:
        super().__init__(every)
        self._options = options
        self._run: Any = None
        self.run_id: str | None = None
        """ID of the W&B run; None before the first fit."""

    def on_fit_start(self, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise LoopError(
                "logging to Weights & Biases", found=f"{error}", fix="pip install wandb.", rank=run.loop.rank
            ) from error
        again = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        self._run = wandb.init(**{**self._options, **again})
        self.run_id = self._run.id

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        self._run.log(numbers(row), step=update)

    def _close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None
