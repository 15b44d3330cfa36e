# SPDX-License-Identifier: Apache-2.0
"""`TensorBoardLog`: logs scalars to TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.log_rows import RowLog, numbers
from ddpilot.trainer.run import Run


class TensorBoardLog(RowLog):
    """Log scalars to TensorBoard in `folder`, on rank 0: every `every` updates (default 50) and after each epoch.

    The x axis is always the number of the update. Use one folder per run: TensorBoard hides earlier points after the
    update at which a run starts or resumes, so a resumed run has no duplicate points. Each write is flushed. Raises
    LoopError, on all ranks, if tensorboard is not installed, OSError if the folder cannot be written, and LoopError for
    `every` below 1.
    """

    def __init__(self, folder: str | os.PathLike[str] = "tensorboard", *, every: int = 50) -> None:
        super().__init__(every)
        self._folder = Path(folder)
        self._writer: Any = None

    def on_fit_start(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise LoopError(
                "writing for TensorBoard",
                found=f"{error}",
                fix="pip install tensorboard; or use CsvLog or JsonLinesLog.",
                rank=run.loop.rank,
            ) from error
        self._writer = SummaryWriter(str(self._folder), purge_step=run.update + 1)

    def _write(self, kind: str, row: dict[str, Any], update: int) -> None:
        for name, value in numbers(row).items():
            if name != "update":
                self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def _close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
