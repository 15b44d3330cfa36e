# SPDX-License-Identifier: Apache-2.0
"""Several validation sets by name, and validation steps of a subclass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import ddpilot
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.best_epoch import EarlyStopping

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
Y = X.sum(1, keepdim=True)
DATA = TensorDataset(X, Y)
CLEAN, NOISY = TensorDataset(X[:5], Y[:5]), TensorDataset(X[3:10], Y[3:10] + 0.3)
SETS: dict[str, Any] = {"clean": CLEAN, "noisy": DataLoader(NOISY, 3)}


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric per sample."""
    return (output - target).abs()


def make(kind: type[ddpilot.Trainer] = ddpilot.Trainer, **options: Any) -> ddpilot.Trainer:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        model = nn.Linear(2, 1).double()
    return kind(model, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), **options)


def fit(trainer: ddpilot.Trainer, val_set: Any, **options: Any) -> ddpilot.History:
    """In this process."""
    given = {"global_batch_size": 4, "nproc_per_node": 0, "progress": False, **options}
    return trainer.fit(DATA, val_set, **given)


@pytest.mark.parametrize("validate_every", ["1 epoch", "2 updates"])
def test_each_set_has_its_columns(validate_every: str) -> None:
    """Also before the first update; without columns of a single set."""
    trainer = make(metrics={"distance": distance})
    row = fit(trainer, SETS, epochs=2, validate_every=validate_every, validate_first=True).rows[-1]
    model = trainer.model
    names = ["val_clean_loss", "val_clean_distance", "val_noisy_loss", "val_noisy_distance"]
    assert [name for name in row if name.startswith("val_")] == names
    assert [name for name in trainer.history.first if name.startswith("val_")] == names
    for name, data in (("clean", CLEAN), ("noisy", NOISY)):
        output, y = model(data.tensors[0]), data.tensors[1]
        assert row[f"val_{name}_loss"] == pytest.approx((output - y).square().mean().item(), rel=1e-12)
        assert row[f"val_{name}_distance"] == pytest.approx((output - y).abs().mean().item(), rel=1e-12)


def test_what_watches_a_set_gets_its_values(tmp_path: Path) -> None:
    """`best`, EarlyStopping, a ReduceLROnPlateau (by the first set), the plot, and a limit for each set."""
    pytest.importorskip("matplotlib")
    stopping = EarlyStopping("val_noisy_loss", mode="max", patience=3)
    trainer = make(callbacks=[stopping], scheduler=lambda one: ReduceLROnPlateau(one, patience=0, threshold=0.9))
    history = fit(
        trainer, SETS, epochs=60, checkpoint_dir=tmp_path, checkpoints={"best": "min val_noisy_loss", "keep": 1}
    )
    values = [row["val_noisy_loss"] for row in history.epochs]
    assert stopping.stopped
    assert stopping.best == max(values)
    best = CheckpointDir(tmp_path, best="min val_noisy_loss").best()
    assert best is not None
    assert best.manifest.metrics["val_noisy_loss"] == min(values)
    assert history.epochs[-1]["lr"] < 0.1
    assert trainer.schedulers["optimizer"].best == history.epochs[0]["val_clean_loss"]
    legend = trainer.plot().axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["loss", "val_clean_loss", "val_noisy_loss"]
    short = fit(make(), SETS, limit_batches={"validation": 1}).epochs[-1]
    assert short["val_noisy_loss"] != pytest.approx(fit(make(), SETS).epochs[-1]["val_noisy_loss"])


def test_a_mapping_with_the_key_0_is_one_dataset() -> None:
    """As a mapping of samples by their index has it."""
    assert "val_loss" in fit(make(), {number: DATA[number] for number in range(len(DATA))}).epochs[-1]


class Own(ddpilot.Trainer):
    """Values by name: a mean, a mean over a number of its own, and one value per sample."""

    def validate_batch(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        assert not model.training
        assert not torch.is_grad_enabled()
        error = model(x) - y
        values = {"mse": error.square().mean(), "largest": error.abs().amax(1)}
        kept = x[:, 0] > 0
        return {**values, "positive": (error[kept].mean(), int(kept.sum()))} if kept.any() else values


def test_own_validation_step_is_recorded() -> None:
    """In fits and by `evaluate`, unless that has metrics of its own."""
    trainer = make(Own)
    row = fit(trainer, {"all": DATA}, epochs=1).epochs[-1]
    error = (trainer.model(X) - Y).detach()
    expected = {"mse": error.square().mean(), "largest": error.abs().mean(), "positive": error[X[:, 0] > 0].mean()}
    for name, value in expected.items():
        assert row[f"val_all_{name}"] == pytest.approx(value.item(), rel=1e-12)
    assert trainer.evaluate(DATA) == pytest.approx({name: float(value) for name, value in expected.items()})
    assert list(trainer.evaluate(DATA, metrics={"distance": distance})) == ["distance"]


class Plain(ddpilot.Trainer):
    """Extends the default."""

    def validate_batch(self, model: nn.Module, batch: Any) -> Any:
        return super().validate_batch(model, batch)


def test_default_validation_step_is_the_loss() -> None:
    """A value alone is named "loss"."""
    assert fit(make(Plain), DATA).epochs[-1]["val_loss"] == fit(make(), DATA).epochs[-1]["val_loss"]


def test_own_validation_step_is_checked() -> None:
    """Metrics would not be computed; a value that is not a number names the batch."""
    with pytest.raises(LoopError, match="'distance'\\), which an overridden `validate_batch` replaces"):
        make(Own, metrics={"distance": distance})

    class Bad(ddpilot.Trainer):
        def validate_batch(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": "low"}

    with pytest.raises(LoopError, match="evaluating the metric 'step' for batch 0: it returned 'low', a str"):
        fit(make(Bad), DATA)
