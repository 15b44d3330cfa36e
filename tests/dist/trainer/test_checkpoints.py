# SPDX-License-Identifier: Apache-2.0
"""A fit with checkpoints: a rank is killed, and the same call resumes exactly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpilot
from tests.dist.trainer.bodies import BATCH_SIZE, make_data, make_trainer


class Counts(ddpilot.Callback):
    """Remembers updates; one rank kills itself once, after a checkpoint is on the disk."""

    ranks = "all"

    def __init__(self, folder: Path | None = None) -> None:
        self.updates: list[int] = []
        self._folder = folder

    def on_update_end(self, run: ddpilot.Run) -> None:
        self.updates.append(run.update)
        if self._folder is None or run.update != 5 or run.loop.rank != 1 or (self._folder / "flag").exists():
            return
        while not (self._folder / "ckpt" / "latest").exists():
            time.sleep(0.01)
        (self._folder / "flag").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit(trainer: ddpilot.Trainer, num_ranks: int, **options: Any) -> None:
    """Three updates an epoch."""
    data: dict[str, Any] = {"global_batch_size": BATCH_SIZE, "nproc_per_node": num_ranks}
    trainer.fit(make_data(), make_data(21, first=60), **data, **options)


def test_fit_resumes_from_its_checkpoint_after_a_rank_was_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At a different number of ranks: weights, average, history and callbacks equal those of an uninterrupted run."""
    counts, folder = Counts(tmp_path), tmp_path / "ckpt"
    trainer = make_trainer(callbacks=[counts])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ddpilot.RankError, match="rank 1 was killed by SIGKILL"):
        fit(trainer, 3, epochs=3, checkpoint_dir=folder)
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    fit(trainer, 2, epochs=3, checkpoint_dir=folder, checkpoints={"best": "max val_distance", "keep": 1})
    assert counts.updates == list(range(1, 10))
    assert "epoch 1, after 3 updates, on 2 ranks instead of 3" in capfd.readouterr().err

    whole = make_trainer()
    fit(whole, 0, epochs=3)
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=1e-10, atol=1e-13)
    assert trainer.ema is not None
    assert whole.ema is not None
    torch.testing.assert_close(trainer.ema.state_dict(), whole.ema.state_dict(), rtol=1e-10, atol=1e-13)
    for name in ("loss", "val_loss", "lr"):
        assert [row[name] for row in trainer.history.epochs] == pytest.approx(
            [row[name] for row in whole.history.epochs], rel=1e-10
        )

    # "the latest there": what this trainer has made since is not undone by it
    with torch.no_grad():
        next(trainer.model.parameters()).zero_()
    fit(trainer, 2, epochs=4, checkpoint_dir=folder)
    fit(whole, 0, epochs=1)
    assert trainer.position.num_updates == 12
    assert trainer.history.epochs[-1]["loss"] > 1.5 * whole.history.epochs[-1]["loss"]
    # and a new trainer goes on with it
    other = make_trainer(callbacks=[Counts()])
    fit(other, 1, epochs=5, checkpoint_dir=folder)
    assert [row["epoch"] for row in other.history.epochs] == [0, 1, 2, 3, 4]
    assert other.history.epochs[3] == trainer.history.epochs[3]
