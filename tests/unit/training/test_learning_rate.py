# SPDX-License-Identifier: Apache-2.0
"""The search for a learning rate: its suggestion, what it leaves unchanged, and what it refuses."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpilot
from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.learning_rate import find_valley
from ddpilot.training.loop import Loop

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")
X = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def make_model() -> nn.Module:
    """With buffers and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)).double()


def step(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def search(change: float = 1.0, **options: Any) -> ddpilot.LearningRateSearch:
    """A search after a few updates; everything is as before."""
    loop = Loop(group=FakeGroup(), progress=False)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = loop.prepare(model, optimizer, schedule)
    loader = loop.loader(DATA, global_batch_size=8, shuffle=True)
    for batch in loop.batches(loader):
        loop.backward(step(model, batch))
        loop.step(optimizer, schedule)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    before = torch.get_rng_state(), random.getstate(), loop.epoch, loop.num_updates
    try:
        return ddpilot.find_learning_rate(
            loop, model, optimizer, loader, lambda model, batch: change * step(model, batch), **options
        )
    finally:
        after = model.state_dict(), optimizer.state_dict(), schedule.state_dict()
        torch.testing.assert_close(after[0], state[0], rtol=0, atol=0)
        torch.testing.assert_close(after[1]["state"], state[1]["state"], rtol=0, atol=0)
        assert (after[1]["param_groups"], after[2]) == (state[1]["param_groups"], state[2])
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), loop.epoch, loop.num_updates)


def test_find_learning_rate_changes_nothing_and_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Between the limits, where the loss falls."""
    found = search(min_lr=1e-5, max_lr=100.0, num_updates=60)
    assert 1e-4 < found.lr < 1
    assert found.lr in found.lrs
    assert found.lrs[0] == pytest.approx(1e-5)
    assert len(found.lrs) == len(found.losses) == len(found.smoothed)
    assert f"lr={found.lr:.3g}, after {len(found.lrs)} updates" in capsys.readouterr().out
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    (axis,) = found.plot().axes
    assert axis.get_xscale() == "log"
    assert len(axis.lines) == 3
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (1.0, {"min_lr": 1e6, "max_lr": 1e9}, "the loss diverged after .* updates, at a learning rate of"),
        (float("nan"), {}, "the loss diverged after 0 updates"),
        (0.0, {}, "the loss never fell between"),
        (1.0, {"min_lr": 1.0, "max_lr": 0.1}, "0 < min_lr < max_lr"),
        (1.0, {"num_updates": 5}, "`num_updates` is 5"),
    ],
)
def test_find_learning_rate_names_what_is_wrong(change: float, options: dict[str, Any], match: str) -> None:
    """And changes nothing."""
    with pytest.raises(LoopError, match=match):
        search(change, **{"num_updates": 40, **options})


def test_find_valley_is_that_of_fastai(monkeypatch: pytest.MonkeyPatch) -> None:
    """On random walks, where fastai is installed, whose import sets variables."""
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.setenv(name, "True")
    schedule = pytest.importorskip("fastai.callback.schedule")
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        losses = torch.randn(40, generator=generator).cumsum(0).tolist()
        place, lrs = find_valley(losses), [float(number) for number in range(40)]
        if place is not None:
            assert schedule.valley(lrs, losses, 40)[0] == place
    assert find_valley([1.0, 2.0, 3.0]) is None
