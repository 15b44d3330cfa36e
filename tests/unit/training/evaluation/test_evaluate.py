# SPDX-License-Identifier: Apache-2.0
"""Evaluation by a step of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.errors import LoopError
from ddpilot.group.fake import FakeGroup
from ddpilot.training.loop import Loop

DATA = TensorDataset(torch.arange(10, dtype=torch.float64).reshape(5, 2))


def test_step_values_are_means_over_all_samples() -> None:
    """Of a mean, of one value per sample, and over a count; a value alone is the loss."""
    loop, model = Loop(group=FakeGroup()), nn.Dropout()
    loader = loop.loader(DATA, global_batch_size=2)

    def step(given: nn.Module, batch: Any) -> Any:
        (x,) = batch
        assert not given.training
        return {"mean": x.mean(), "rows": x[:, 0], "few": (x[:1, 0].mean(), 1)}

    values = loop.evaluate(model, loader, step=step)
    assert values == {"mean": pytest.approx(4.5), "rows": pytest.approx(4.0), "few": pytest.approx(4.0)}
    assert loop.evaluate(model, loader, step=lambda _, batch: batch[0].mean()) == {"loss": pytest.approx(4.5)}
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither `metrics` nor `step`"),
        ({"metrics": {}, "step": print}, "`step` next to `metrics` or `forward`"),
        ({"step": print, "forward": print}, "`step` next to `metrics` or `forward`"),
        ({"step": 3}, "`step` is a int"),
        ({"step": lambda *_: {"a": torch.ones(3)}}, r"'step' for batch 0: a tensor of shape \(3,\) for 2 samples"),
    ],
)
def test_step_is_checked(options: dict[str, Any], message: str) -> None:
    """One of both, and values that are numbers."""
    loop = Loop(group=FakeGroup())
    with pytest.raises(LoopError, match=message):
        loop.evaluate(nn.Identity(), loop.loader(DATA, global_batch_size=2), **options)
