# SPDX-License-Identifier: Apache-2.0
"""Evaluation by a step of the user's own."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
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


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process can become larger, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_predict_says_what_the_system_said_where_a_batch_cannot_be_written(tmp_path: Path) -> None:
    """With the file, and what to do; nothing is left there, and the room it took is free."""
    loop = Loop(group=FakeGroup(), progress=False)
    loader = loop.loader(TensorDataset(torch.ones(6, 1)), global_batch_size=3)
    with (
        largest_file(4 << 20),
        pytest.raises(LoopError, match=r"predicting into .*out: OSError: .*File too large") as caught,
    ):
        loop.predict(nn.Linear(1, 1), loader, to=tmp_path / "out", forward=lambda m, batch: torch.ones(3, 1 << 19))
    assert "on a disk with free space" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []
