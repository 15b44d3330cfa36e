# SPDX-License-Identifier: Apache-2.0
"""When training stops, with which weights, and the weights of the best epoch as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpilot.checkpoint.weights import load_weights
from ddpilot.errors import LoopError
from ddpilot.trainer.callbacks.best_epoch import BestWeights, EarlyStopping
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer, metric


@pytest.mark.parametrize(
    ("options", "values", "num_epochs"),
    [
        ({"mode": "max", "patience": 2}, (1.0, 3.0, 2.0, 3.0, 9.0), 4),
        ({"mode": "min", "patience": 1}, (3.0, 2.0, 1.0, 1.0, 0.0), 4),
        ({"mode": "max", "patience": 1, "min_delta": 0.5}, (1.0, 2.0, 2.5, 9.0, 9.0), 3),
        ({"mode": "max", "patience": 1, "start": 4}, (3.0, 2.0, 1.0, 1.0, 9.0), 4),
        ({"mode": "max", "patience": 1, "start": "7 updates"}, (3.0, 2.0, 1.0, 1.0, 9.0), 3),
        ({"mode": "max", "stop_at": 2.0}, (float("nan"), 1.0, 2.0, 9.0, 9.0), 3),
        ({"mode": "min", "stop_at": 2.0, "start": 3}, (1.0, 5.0, 1.5, 5.0, 5.0), 3),
        ({"mode": "max", "stop_at": 2.0, "min_delta": 0.5}, (1.0, 1.8, 2.1, 9.0, 9.0), 3),
        ({"mode": "max", "patience": 2}, (float("nan"), 1.0, float("nan"), 2.0, 3.0), 5),
    ],
)
def test_early_stopping_counts_epochs_without_a_better_value(
    options: Any, values: tuple[float, ...], num_epochs: int
) -> None:
    """Equal values, values within `min_delta` and NaN are not better; a better one resets the count.

    It stops at once where `stop_at` is reached, and never before `start`.
    """
    stopping = EarlyStopping("val_score", **options)
    assert len(fit(make_trainer(metric(*values), stopping), 5).history.epochs) == num_epochs
    assert bool(stopping.stopped) == (num_epochs < 5)


def test_early_stopping_is_remembered_in_checkpoints(tmp_path: Path) -> None:
    """The same call with a total trains no more, in a new trainer and in the same one; a larger total does."""

    def run_all_again(until_epoch: int) -> Any:
        trainer = make_trainer(metric(*[1.0] * 9), EarlyStopping("val_score", patience=2))
        return fit(trainer, until_epoch=until_epoch, checkpoint_dir=tmp_path)

    assert [len(run_all_again(5).history.epochs) for _ in range(2)] == [3, 3]
    again = run_all_again(5)
    assert len(fit(again, until_epoch=5, checkpoint_dir=tmp_path).history.epochs) == 3
    assert len(run_all_again(9).history.epochs) == 5
    assert len(fit(again, epochs=2).history.epochs) == 5


def test_early_stopping_restores_the_weights_of_the_best_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, the average's too; a second fit that gets no better ends with them again."""
    seen: list[list[torch.Tensor]] = []

    def copy(run: Any) -> None:
        models = (run.model, run.ema)
        seen.append([tensor.detach().clone() for model in models for tensor in model.parameters()])

    stopping = EarlyStopping("val_score", mode="max", patience=2, restore_best=True)
    values = (1.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
    trainer = make_trainer(metric(*values), Each("on_epoch_end", copy), stopping, ema=0.5)
    for num_epochs in (4, 6):
        fit(trainer, 9)
        assert len(seen) == num_epochs
        assert trainer.ema is not None
        best = [*trainer.model.parameters(), *trainer.ema.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(best, seen[1], strict=True))
        assert (stopping.best, stopping.best_epoch) == (5.0, 1)
        assert "weights" not in stopping.state_dict()
    assert "val_score was not better than 5.0 of epoch 1 for 2 epochs" in capsys.readouterr().out


def test_early_stopping_continues_from_its_state() -> None:
    """As from a checkpoint: the count and the best weights too."""
    stopping = EarlyStopping("val_score", mode="max", patience=3, restore_best=True)
    states: list[Any] = []
    keep = Each("on_epoch_end", lambda run: states.append(stopping.state_dict()))
    trainer = fit(make_trainer(metric(5.0, 1.0), stopping, keep), 2)
    again = EarlyStopping("val_score", mode="max", patience=3, restore_best=True)
    again.load_state_dict(states[-1])
    assert (again.best, again.num_bad) == (5.0, 1)
    trainer.callbacks = [metric(1.0, 1.0, 9.0), again]
    assert len(fit(trainer, 3).history.epochs) == 4
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), states[0]["weights"], strict=True))


def test_early_stopping_lists_the_metrics_when_it_has_a_wrong_name() -> None:
    """After the first epoch, on all ranks, as a different callback could have written it."""
    with pytest.raises(
        LoopError, match="in epoch 0: its row has .*'val_score'. Did you mean 'val_score'.*validation set"
    ):
        fit(make_trainer(metric(1.0), EarlyStopping("val_scor")))
    with pytest.raises(LoopError, match="`mode` is 'best'"):
        EarlyStopping(mode="best")  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="`patience` is 0"):
        EarlyStopping(patience=0)
    with pytest.raises(LoopError, match="`start` is '500 steps'. Did you mean \"500 updates\""):
        EarlyStopping(start="500 steps")
    with pytest.raises(LoopError, match="`min_delta` is -1"):
        EarlyStopping(min_delta=-1)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_best_weights_are_those_of_the_best_epoch(tmp_path: Path, ema: float | None) -> None:
    """Those of the EMA if there is one; no temporary file remains."""
    seen: list[Any] = []
    copy = Each(
        "on_epoch_end",
        lambda run: seen.append([p.detach().clone() for p in (run.ema or run.model).parameters()]),
    )
    best = BestWeights(tmp_path / "new" / "best.safetensors", "val_score", mode="max")
    fit(make_trainer(metric(1.0, 3.0, 2.0), copy, best, ema=ema), 3)
    model = make_trainer().model
    load_weights(model, tmp_path / "new" / "best.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), seen[1], strict=True))
    assert (best.best, best.best_epoch) == (3.0, 1)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["best.safetensors"]


def test_best_weights_stay_when_a_resumed_run_does_not_improve(tmp_path: Path) -> None:
    """The best value is restored with the state."""
    path = tmp_path / "best.safetensors"
    first, second = (BestWeights(path, "val_score", mode="max") for _ in range(2))
    trainer = fit(make_trainer(metric(3.0), first))
    written = path.read_bytes()
    second.load_state_dict(first.state_dict())
    trainer.callbacks = [metric(2.0), second]
    fit(trainer)
    assert path.read_bytes() == written
