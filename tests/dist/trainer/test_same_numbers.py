# SPDX-License-Identifier: Apache-2.0
"""A trainer gives the numbers of a plain loop in one process, on any number of ranks, in one fit or in two."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ddpilot
from tests.dist.trainer.bodies import (
    BATCH_SIZE,
    launcher,
    make_data,
    make_model,
    make_optimizer,
    make_trainer,
    train_plainly,
)
from tests.soak import often

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Three epochs of the plain loop."""
    return train_plainly(3)


@pytest.mark.timeout(100)
@often("0", "4")
@pytest.mark.parametrize("num_ranks", [0, 1, 2, 4])
def test_trainer_has_the_numbers_of_a_plain_loop(num_ranks: int, plain: dict[str, Any]) -> None:
    """Losses, weights, average, moments, metrics: after a fit of two epochs and one of a third, in the same objects."""
    trainer = make_trainer()
    parameters, optimizer = list(trainer.model.parameters()), trainer.optimizers["optimizer"]
    validation = make_data(21, first=60)
    for num_epochs in (2, 1):
        history = trainer.fit(
            make_data(), validation, epochs=num_epochs, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks
        )
    assert history is trainer.history
    assert [row["epoch"] for row in history.epochs] == [0, 1, 2]
    assert [row["update"] for row in history.updates] == list(range(1, 10))
    assert [row["loss"] for row in history.updates] == pytest.approx(plain["updates"], rel=1e-10)
    assert [row["loss"] for row in history.epochs] == pytest.approx(plain["losses"], rel=1e-10)
    last = history.epochs[-1]
    for name in ("val_loss", "val_distance", "lr"):
        assert last[name] == pytest.approx(plain[name], rel=1e-10)
    assert all(one is other for one, other in zip(parameters, trainer.model.parameters(), strict=True))
    assert trainer.optimizers["optimizer"] is optimizer
    same(trainer.model.state_dict(), plain["weights"])
    assert trainer.ema is not None
    same(trainer.ema.module.state_dict(), plain["average"])
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    same(moments, plain["moments"])
    same(trainer.predict(validation), plain["output"])


class Measuring(ddpilot.Trainer):
    """With a validation step that returns a mean of its own numbers, and a value that some ranks lack."""

    def validate_batch(self, model: torch.nn.Module, batch: Any) -> Any:
        x, y = batch
        error, kept = (model(x) - y).square(), x[:, 0] > -0.2
        values = {"loss": error.mean()}
        return {**values, "kept": (error[kept].mean(), kept.sum())} if kept.any() else values


@pytest.mark.timeout(100)
def test_named_validation_sets_have_the_same_numbers_at_any_number_of_ranks() -> None:
    """Of any length, with metrics or with a validation step, and what plain PyTorch gives for the trained weights."""
    sets = {"few": make_data(2, first=60), "more": make_data(21, first=30)}
    rows = []
    for num_ranks in (1, 3):
        plain = make_trainer()
        own = Measuring(make_model(), torch.nn.functional.mse_loss, make_optimizer, launcher=launcher())
        for trainer in (plain, own):
            trainer.fit(make_data(), sets, global_batch_size=BATCH_SIZE, nproc_per_node=num_ranks, progress=False)
        rows.append([{k: v for k, v in one.history.epochs[-1].items() if k.startswith("val_")} for one in (plain, own)])
    for name, data in sets.items():
        x, y = data.tensors
        assert plain.ema is not None
        error = (plain.ema.module(x) - y).detach()
        assert rows[0][0][f"val_{name}_loss"] == pytest.approx(error.square().mean().item(), rel=1e-10)
        assert rows[0][0][f"val_{name}_distance"] == pytest.approx(error.abs().mean().item(), rel=1e-10)
        error, kept = (own.model(x) - y).detach().square(), x[:, 0] > -0.2
        assert rows[0][1][f"val_{name}_loss"] == pytest.approx(error.mean().item(), rel=1e-10)
        if kept.any():
            assert rows[0][1][f"val_{name}_kept"] == pytest.approx(error[kept].mean().item(), rel=1e-10)
    for others in rows[1:]:
        for first, other in zip(rows[0], others, strict=True):
            assert list(other) == list(first)
            assert other == pytest.approx(first, rel=1e-10)


def test_verbs_give_the_same_in_this_process_and_on_ranks(tmp_path: Any) -> None:
    """evaluate, predict and call; predictions are in the dataset's order, in memory and as files."""
    trainer, data = make_trainer(ema=None), make_data(21)
    here = trainer.evaluate(data, global_batch_size=5)
    assert here == pytest.approx(trainer.evaluate(data, nproc_per_node=2, global_batch_size=5), rel=1e-10)
    assert here["distance"] == pytest.approx((trainer.model(data.tensors[0]) - data.tensors[1]).abs().mean().item())
    expected = trainer.model(data.tensors[0]).detach()
    same(trainer.predict(data), expected)
    same(trainer.predict(data, nproc_per_node=2, global_batch_size=5), expected)
    folder = trainer.predict(data, nproc_per_node=2, global_batch_size=5, to=tmp_path / "said")
    assert folder == tmp_path / "said"
    assert len(list(folder.glob("batch-*.pt"))) == 5
    x = data.tensors[0][:3]
    assert torch.equal(trainer.call("forward", x), trainer.model(x).detach())
    on_two = trainer.call("forward", x, nproc_per_node=2, ranks="all")
    assert len(on_two) == 2
    assert all(torch.equal(each, trainer.model(x).detach()) for each in on_two)
