# SPDX-License-Identifier: Apache-2.0
"""Averages of weights in a `Loop`, and BatchNorm statistics of an average: the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import TensorDataset

from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state
from ddpilot.training.models.sharding import ParameterSharding, local_parts
from ddpilot.training.step.weight_averages import Averaging
from tests.dist.training.bodies import launch
from tests.soak import often

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
SHARDED = ParameterSharding(min_parameters=8)
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 14, 4, 4
"""The last batch has two samples: of three ranks one has none."""
KINDS: dict[str, Averaging | float] = {
    "EMA": 0.9,
    "EMA later": Averaging(decay=0.8, start=3, every="2 updates"),
    "SWA": Averaging(start="2 epochs", every="1 epoch"),
}


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    """The same every time. BatchNorm trains with fixed statistics, since batch statistics depend on the ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    model.eval()
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3).double(), torch.randn(NUM_SAMPLES, 4).double())
    return model, torch.optim.SGD(model.parameters(), lr=0.3), data


def plainly() -> dict[str, dict[str, torch.Tensor]]:
    """The averages by hand, each with its BatchNorm statistics."""
    model, optimizer, data = make()
    batches = [data[ids] for ids in torch.arange(NUM_SAMPLES).split(BATCH_SIZE)]  # type: ignore[no-untyped-call]
    averages = {name: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for name in KINDS}  # type: ignore[no-untyped-call]
    averages["EMA later"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))  # type: ignore[no-untyped-call]
    averages["SWA"] = AveragedModel(model)
    num_updates = 0
    for epoch in range(NUM_EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            num_updates += 1
            averages["EMA"].update_parameters(model)
            if num_updates >= 3 and num_updates % 2 == 0:
                averages["EMA later"].update_parameters(model)
        if epoch >= 1:
            averages["SWA"].update_parameters(model)
    for average in averages.values():
        update_bn(batches, average)
    return {name: average.module.state_dict() for name, average in averages.items()}


def with_loop(folder: Path | None = None, stop_at: int = -1, shard: Any = None) -> dict[str, Any]:
    """The same with a `Loop`; `folder`: for checkpoints. `stop_at`: all ranks stop after that update."""
    loop = Loop(progress=False, checkpoint_dir=folder)
    given, old, data = make()
    model, optimizer = loop.prepare(given, old, shard=shard)
    averages = {name: loop.average(model, how) for name, how in KINDS.items()}
    loader = loop.loader(data, global_batch_size=BATCH_SIZE)
    early = {}
    for _ in loop.epochs(NUM_EPOCHS):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(mse_loss(model(x), y))
            loop.step(optimizer)
            if loop.num_updates == 2:  # neither has begun: it is the model
                values = [loop.evaluate(one, loader, {"loss": mse_loss})["loss"] for one in (model, averages["SWA"])]
                assert values[0] == pytest.approx(values[1], rel=1e-12)
            if loop.num_updates == stop_at:
                loop.stop(everywhere=True)
        if loop.should_stop:
            return {}
    for name, average in averages.items():
        loop.update_batch_norm(average, loader)
        early[name] = copy.deepcopy(full_state(average.module))
        assert not any(layer.training for layer in average.modules() if isinstance(layer, nn.BatchNorm1d))
    return early


def in_parts(folder: Path) -> dict[str, Any]:
    """With a stop within an epoch, a resume, a stop at its end, and a resume."""
    with_loop(folder, 5)
    with_loop(folder, 12)
    return with_loop(folder)


def all_ways(folder: Path) -> list[dict[str, Any]]:
    """By hand, in one run and in parts."""
    return [plainly(), with_loop(), in_parts(folder)]


@often("3")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_averages_are_those_of_plain_pytorch(num_ranks: int, tmp_path: Path) -> None:
    """EMA, also later and not at each update, and SWA by epochs, with BatchNorm statistics; resumed in the middle."""
    for expected, *found in launch(num_ranks, all_ways, tmp_path / "checkpoints"):
        for run in found:
            for name, weights in expected.items():
                same(run[name], weights, msg=f"{name}: {{}}".format)


def held_in_shards() -> tuple[dict[str, Any], list[int]]:
    """Averages of a sharded model in one run; and how many values this rank holds of a model and of an average."""
    found = with_loop(shard=SHARDED)
    loop = Loop(progress=False)
    model = loop.prepare(make()[0], shard=SHARDED)
    average = loop.average(model, 0.9)
    assert [name for name, _ in average.module.named_parameters()] == [name for name, _ in model.named_parameters()]
    return found, [sum(one.numel() for one in local_parts(list(kind.parameters()))) for kind in (model, average)]


def in_one_process(folder: Path) -> list[dict[str, Any]]:
    """By hand, and resumed from sharded averages."""
    return [plainly(), with_loop(folder, shard=SHARDED)]


def test_averages_of_a_sharded_model_are_those_of_plain_pytorch_and_resume_at_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """In one run of three ranks; begun on two ranks, resumed on three, and then in one process."""
    folder = tmp_path / "checkpoints"
    of_three = launch(3, held_in_shards)
    launch(2, with_loop, folder, 5, SHARDED)
    launch(3, with_loop, folder, 12, SHARDED)
    ((expected, resumed),) = launch(1, in_one_process, folder)
    for found in (of_three[0][0], resumed):
        for name, weights in expected.items():
            same(found[name], weights, msg=f"{name}: {{}}".format)
    num_all = sum(one.numel() for name, one in expected["EMA"].items() if name.endswith(("weight", "bias")))
    assert [sum(held) for held in zip(*(held for _, held in of_three), strict=True)] == [num_all, num_all]
