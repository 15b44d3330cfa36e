# SPDX-License-Identifier: Apache-2.0
"""A `loss_fn` with several losses trains and records as one process does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from ddpilot.group.init_group import seed_all
from ddpilot.trainer.trainer import Trainer
from tests.dist.training.bodies import launch
from tests.dist.training.test_losses import BATCH_SIZE, NUM_EPOCHS, TwoHeads, make_data, train_all_plain


def several(output: tuple[torch.Tensor, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """A mean over samples, and one over labels."""
    (value, scores), (_, y, labels) = output, batch
    label = cross_entropy(scores, labels, ignore_index=-1), (labels >= 0).sum()
    return {"value": mse_loss(value, y), "label": label}


def fit() -> tuple[torch.Tensor, list[dict[str, Any]], float]:
    """Weights, the history, and the loss of an evaluation."""
    seed_all(0)
    model = TwoHeads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, several, optimizer, forward=lambda model, batch: (model(batch[0]), batch))
    history = trainer.fit(
        make_data(), make_data(), epochs=NUM_EPOCHS, global_batch_size=BATCH_SIZE, shuffle=True, progress=False
    )
    weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    return weights, history.epochs, trainer.evaluate(make_data())["loss"]


def test_several_losses_train_and_are_recorded_as_in_one_process() -> None:
    """Each by its own count, and their sum as "loss"; also in the validation, with any batches."""
    (plain,) = launch(1, train_all_plain)
    (expected,) = launch(1, fit)
    for weights, epochs, loss in [expected, *launch(3, fit)]:
        assert torch.allclose(weights, plain[0][1], rtol=1e-10, atol=1e-12)
        for row, other in zip(epochs, expected[1], strict=True):
            for name in ("loss", "value", "label", "val_loss"):
                assert row[name] == pytest.approx(other[name], rel=1e-10)
            assert row["loss"] == pytest.approx(row["value"] + row["label"], rel=1e-12)
        assert loss == pytest.approx(epochs[-1]["val_loss"], rel=1e-10)
        assert not math.isnan(loss)
