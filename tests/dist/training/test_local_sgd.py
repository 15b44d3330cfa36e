# SPDX-License-Identifier: Apache-2.0
"""`sync_every`: rank by rank against torch's local SGD and its averager; averaged before weights are read; resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from benchmarks.small_models import loss_fn, make_data, make_model
from ddpilot.errors import LoopError, NonFiniteError
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state
from tests.dist.training.bodies import launch

EVERY, START = 4, 3


def make(**options: Any) -> tuple[Loop, Any, nn.Module, AveragedModel]:
    """A loop, its batches (of three ranks one is empty at the end), a model and its moving average."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=5, progress=False, **options)
    model = make_model("mlp")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    return loop, loop.loader(make_data("mlp", 109), global_batch_size=12, shuffle=True), model, average


def train(num_epochs: int = 3, stop_at: int = -1, **options: Any) -> dict[str, Any]:
    """The weights of this rank after each update, and what is read at the end."""
    loop, loader, model, average = make(**options)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, average = loop.prepare(model, optimizer, average, sync_every=EVERY, sync_start=START)
    after, evaluated = [], {}
    for epoch in loop.epochs(num_epochs):
        for x, y in loop.batches(loader):
            loop.backward(loss_fn(model(x), y))
            loop.clip_grad_norm_(model.parameters(), 0.5)
            loop.step(optimizer)
            average.update_parameters(model)
            after.append(copy.deepcopy([one.detach() for one in model.parameters()]))
            if loop.num_updates == stop_at:
                loop.stop(everywhere=True)
        if epoch == 1 and not loop.should_stop:
            evaluated = loop.evaluate(model, loader, {"loss": loss_fn})
    return {
        "after": after,
        "weights": [one.detach() for one in model.parameters()],
        "average": [one.detach() for one in average.parameters()],
        "optimizer": optimizer.state_dict()["state"],
        "evaluated": evaluated,
        "num": loop.num_updates,
    }


def train_by_hand() -> dict[str, Any]:
    """The same with torch's hook and averager; and averaged at the end of each epoch."""
    loop, loader, inner, average = make()
    model = DistributedDataParallel(inner)
    state = PostLocalSGDState(None, None, START, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(EVERY, warmup_steps=START + EVERY - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    after = []
    for _ in loop.epochs(3):
        for x, y in loop.batches(loader):
            assert loop.batch is not None
            share = loop.batch.count * loop.world_size / loop.batch.global_count
            loss = loss_fn(model(x), y) if loop.batch.count else model(x).sum() * 0
            torch.autograd.backward(loss * share)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            average.update_parameters(inner)
            after.append(copy.deepcopy([one.detach() for one in model.parameters()]))
            averager.average_parameters(model.parameters())
            optimizer.zero_grad()
        average_parameters(iter(model.parameters()), dist.group.WORLD)  # type: ignore[arg-type]
    average_parameters(iter(average.module.parameters()), dist.group.WORLD)  # type: ignore[arg-type]
    return {
        "after": after,
        "weights": [one.detach() for one in model.parameters()],
        "average": [one.detach() for one in average.parameters()],
        "optimizer": optimizer.state_dict()["state"],
    }


def train_all(folder: str) -> dict[str, Any]:
    """With the loop and by hand; of two ranks also stopped within an epoch and resumed."""
    found = {"loop": train(), "by hand": train_by_hand()}
    if dist.get_world_size() == 2:
        options: dict[str, Any] = {"checkpoint_dir": f"{folder}/run", "save_every_updates": 2}
        found["stopped"] = train(3, 12, **options)
        found["resumed"] = train(3, **options)
    if dist.get_world_size() == 3:
        found["at 3"] = train(4, checkpoint_dir=f"{folder}/run")
    return found


def assert_close(one: Any, other: Any) -> None:
    """To 1e-10."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_local_sgd_is_torchs_own_rank_by_rank_and_resumes_with_each_ranks_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights of each rank after each update; a stop waits for the next averaging, and nothing is lost."""
    for num in (1, 2, 3):
        ranks = launch(num, train_all, str(tmp_path))
        for rank in ranks:
            for name in ("after", "weights", "average", "optimizer"):
                assert_close(rank["loop"][name], rank["by hand"][name])
            assert_close(rank["loop"]["weights"], ranks[0]["loop"]["weights"])
            assert rank["loop"]["evaluated"] == ranks[0]["loop"]["evaluated"]
            if num == 2:
                assert rank["stopped"]["num"] == 15
                for name in ("weights", "average", "optimizer", "evaluated"):
                    assert_close(rank["resumed"][name], rank["loop"][name])
        if num > 1:
            assert not torch.equal(ranks[0]["loop"]["after"][4][0], ranks[1]["loop"]["after"][4][0])
    said = [line for line in capfd.readouterr().err.splitlines() if "resuming from" not in line]
    assert len(said) == 1, said
    assert "not resumed, as the checkpoint is of 2 ranks, this run has 3: optimizer is that of rank 0" in said[0]


def use_wrongly() -> list[str]:
    """A loss that is not finite on one rank, weights that are read within an epoch, and refused options."""
    loop = Loop(progress=False)
    model = nn.Linear(6, 5)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=100)
    loader = loop.loader(TensorDataset(torch.randn(40, 6) + loop.rank), global_batch_size=2)
    said = []
    try:
        for (x,) in loop.batches(loader):
            is_bad = loop.rank == 1 and loop.num_updates == 4
            loop.backward(model(x).pow(2).mean() * (float("nan") if is_bad else 1.0))
            loop.step(optimizer)
            if loop.num_updates == 3:
                weights = full_state(model)
                assert len(set(loop.group.all_gather_object(weights["weight"].sum().item()))) == 1
    except NonFiniteError as error:
        said.append(str(error))
    assert all(bool(torch.isfinite(one).all()) for one in model.parameters())
    for use in (
        lambda: loop.prepare(nn.Linear(1, 1), sync_every=0),
        lambda: loop.prepare(nn.Linear(1, 1), sync_every=8),
        lambda: loop.prepare(nn.Linear(1, 1), sync_every=8, comm="powersgd"),
        lambda: loop.prepare(nn.Linear(1, 1), sync_every=8, shard="parameters"),
        lambda: loop.step(optimizer, closure=lambda: None),
        lambda: Loop(precision="fp16").prepare(nn.Linear(1, 1), sync_every=8),
    ):
        try:
            use()
        except LoopError as error:
            said.append(str(error))
    return [*said, str(loop.explain())]


def test_a_nan_of_one_rank_reaches_all_and_misuse_is_refused() -> None:
    """Though no gradient is exchanged; and the weights stay finite."""
    expected = (
        "on rank 1 the loss is nan",
        "`sync_every` is 0",
        "for another model, 100 and 0",
        "`comm` with `sync_every=8`",
        "`shard` with `sync_every=8`",
        "a closure with `sync_every`",
        '`sync_every` with `precision="fp16"`',
        "sync_every = 100",
    )
    for said in launch(2, use_wrongly):
        for text, part in zip(said, expected, strict=True):
            assert part in text
