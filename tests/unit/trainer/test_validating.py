# SPDX-License-Identifier: Apache-2.0
"""A validation after every so many epochs, and what watches its metrics in those between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot.callbacks import BestWeights, EarlyStopping
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import LoopError

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def make_trainer(*callbacks: ddpilot.Callback, maximize: bool = False, **options: Any) -> ddpilot.Trainer:
    """A small one, in float64."""
    return ddpilot.Trainer(
        nn.Linear(2, 1).double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, maximize=maximize),
        callbacks=callbacks,
        **options,
    )


def fit(trainer: ddpilot.Trainer, **options: Any) -> list[int]:
    """Train on in this process; the epochs of all fits that were validated."""
    options = {"global_batch_size": 5, "nproc_per_node": 0, "progress": False, **options}
    history = trainer.fit(DATA, DATA, **options)
    return [row["epoch"] for row in history.epochs if "val_loss" in row]


def test_every_kth_epoch_over_all_fits_and_the_last_of_each_is_validated() -> None:
    """Counted from the first epoch of the training, so that a fit in two parts validates at the same places."""
    trainer = make_trainer()
    assert fit(trainer, epochs=7, validate_every=3) == [2, 5, 6]
    assert fit(trainer, epochs=3, validate_every=3) == [2, 5, 6, 8, 9]


def test_what_watches_a_validation_looks_at_validated_epochs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best weights, the best checkpoint and early stopping pass over the others, and nothing is said to be missing."""
    best, stopping = BestWeights(tmp_path / "best.safetensors"), EarlyStopping("val_loss", patience=2)
    options = {"checkpoint_dir": tmp_path / "ckpt", "checkpoints": {"best": "min val_loss"}}
    assert fit(make_trainer(best, stopping, maximize=True), epochs=20, validate_every=2, **options) == [1, 3, 5]
    chosen = CheckpointDir(tmp_path / "ckpt", best="min val_loss").best()
    assert best.best_epoch == stopping.best_epoch == 1
    assert chosen is not None
    assert chosen.manifest.metrics["val_loss"] == best.best
    assert "there is no best" not in capsys.readouterr().err


def test_a_plateau_is_judged_by_validations_alone() -> None:
    """A scheduler that looks at the validation loss is not given the training loss in between."""
    trainer = make_trainer(scheduler=lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=9))
    fit(trainer, epochs=5, validate_every=2)
    assert trainer.schedulers["optimizer"].last_epoch == 3


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_validate_every_is_a_number_of_epochs(every: Any) -> None:
    """Anything else is refused before training."""
    with pytest.raises(LoopError, match="`validate_every` is"):
        fit(make_trainer(), validate_every=every)


def test_explain_says_what_the_last_fit_chose() -> None:
    """Not before there was one."""
    trainer = make_trainer()
    with pytest.raises(LoopError, match="no fit has ended yet"):
        trainer.explain()
    fit(trainer)
    assert "Linear: not wrapped, one rank alone" in str(trainer.explain())
