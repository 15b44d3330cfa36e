# SPDX-License-Identifier: Apache-2.0
"""The weights of the best epoch, as a file that any model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpilot.checkpoint.weights import load_weights
from ddpilot.trainer.callbacks.best_epoch import BestWeights
from tests.unit.trainer.callbacks.fits import Each, fit, make_trainer, metric


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
