# SPDX-License-Identifier: Apache-2.0
"""Runs that combine features at random are ended at a random update, and go on as if nothing had been.

The numbers are those of a run without a stop: at one rank, or at as many ranks where the numbers depend on that.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from ddpilot import Averaging, PowerSGD, RankError, ShardedDataset
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import full_state
from tests.dist.training.bodies import launch
from tests.soak import IS_SOAK

NUM_UPDATES = 9
NUM_TRIALS = 30
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "optimizer": {"shard": "optimizer"},
    "parameters": {"shard": "parameters"},
    "powersgd": {"comm": PowerSGD(rank=1, start=2)},
    "local": {"sync_every": 2, "sync_start": 1},
}
DEPENDENT = ("powersgd", "local")
"""Strategies whose numbers depend on the number of ranks."""


@dataclass(frozen=True)
class Features:
    """What a run uses."""

    strategy: str
    data: str
    accumulate: Any
    clip: Any
    average: Any
    has_scheduler: bool
    tracks_per_rank: bool
    is_at_url: bool


def draw(chance: random.Random, trial: int) -> Features:
    """Each strategy every fifth time."""
    strategy = list(STRATEGIES)[trial % len(STRATEGIES)]
    averages = (None, 0.8, Averaging(start="2 updates", every="2 updates"))
    return Features(
        strategy=strategy,
        data=chance.choice(("map", "shards", "stream", "in step", "by weights")),
        accumulate=chance.choice((1, 2, {0: 1, "4 updates": 2})),
        clip=chance.choice((None, 1.0, 2.0, float("inf"), "value")),
        average=chance.choice(averages),
        has_scheduler=chance.random() < 0.5,
        tracks_per_rank=strategy in DEPENDENT and chance.random() < 0.5,
        is_at_url=chance.random() < 0.3,
    )


class Shards(ShardedDataset):
    """Five shards of unequal lengths."""

    lengths = (7, 2, 9, 1, 7)
    num_shards = len(lengths)

    def open(self, shard: int, skip: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Samples of a sine."""
        for number in range(skip, self.lengths[shard]):
            x = torch.sin(torch.arange(5.0) * (1 + 10 * shard + number))
            yield x, x.sum().reshape(1)


class Endless(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream without a length and without an end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Samples of a cosine."""
        for number in itertools.count():
            x = torch.cos(torch.arange(5.0) * (1 + number))
            yield x, x.sum().reshape(1)


class Seen:
    """Counts the batches of a rank: its own state."""

    num_batches = 0

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a count over."""
        self.num_batches = state["num_batches"]


def samples(num: int, seed: int) -> TensorDataset:
    """Of a linear function."""
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(features: Features, folder: Path | None, kill: tuple[str, int, int] | None) -> dict[str, Any]:
    """Train `NUM_UPDATES` updates in all; `kill`: a signal's name, a rank, and the update after which it gets it."""
    torch.set_default_dtype(torch.float64)
    saving: dict[str, Any] = {"checkpoint_dir": folder, "save_every": "1 updates"} if folder else {}
    if folder and features.is_at_url:
        saving |= {"checkpoint_dir": f"file://{folder}/store", "staging_dir": folder / "staging"}
    loop = Loop(seed=2, progress=False, accumulate=features.accumulate, **saving)
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = loop.prepare(model, optimizer, **STRATEGIES[features.strategy])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if features.has_scheduler else None
    if scheduler is not None:
        loop.prepare(scheduler)
    average = None if features.average is None else loop.average(model, features.average)
    seen = Seen()
    if features.tracks_per_rank:
        loop.track(seen=seen, per_rank=True)
    known = samples(26, 1)
    data: Any = {"shards": Shards(), "stream": Endless()}.get(features.data, known)
    first = loop.loader(data, global_batch_size=6, shuffle=features.data != "stream")
    second = loop.loader(samples(14, 2), global_batch_size=4, shuffle=True)
    losses = []
    for _ in loop.epochs(max_updates=NUM_UPDATES):
        for batch in passes(loop, features.data, first, second):
            seen.num_batches += 1
            with loop.accumulate(model):
                loss, count = backward(loop, model, batch)
            if features.clip == "value":
                loop.clip_grad_value_(model.parameters(), 0.1)
            elif features.clip is not None:
                loop.clip_grad_norm_(model.parameters(), 0.3, features.clip)
            loop.step(optimizer, scheduler)
            losses.append(loop.reduce(loss.detach(), count=count).item())
            if kill is not None and (loop.rank, loop.num_updates) == kill[1:]:
                os.kill(os.getpid(), getattr(signal, kill[0]))
    rows = loop.loader(known, global_batch_size=6)
    metric = loop.evaluate(model, rows, {"error": lambda output, y: (output - y).abs()})["error"]
    return {
        "losses": losses,
        "metric": metric,
        "weights": full_state(model),
        "average": None if average is None else full_state(average.module),
        "lr": optimizer.param_groups[0]["lr"],
        "seen": seen.num_batches,
    }


def passes(loop: Loop, data: str, first: Any, second: Any) -> Any:
    """The batches of an epoch."""
    if data == "in step":
        return loop.batches(first, second, ends="longest")
    return loop.batches(first, second, weights=[2, 1]) if data == "by weights" else loop.batches(first)


def backward(loop: Loop, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """The loss of the first loader, and of how many samples it is."""
    if not isinstance(batch[0], torch.Tensor):
        (x, y), (more, target) = batch
        output = model(torch.cat([x, more]))
        loss = mse_loss(output[: len(x)], y)
        loop.backward((loss, 0.5 * (output[len(x) :] - target).abs().mean()))
        return loss, len(x)
    x, y = batch
    loss = mse_loss(model(x), y)
    loop.backward(loss)
    return loss, len(x)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("trial", range(NUM_TRIALS) if IS_SOAK else range(len(STRATEGIES)))
def test_any_features_resume_at_any_update(tmp_path: Path, trial: int) -> None:
    """By a kill or a signal, into another number of ranks if the numbers do not depend on that."""
    chance = random.Random(trial)
    features = draw(chance, trial)
    is_dependent = features.strategy in DEPENDENT
    num_before = chance.randint(2 if is_dependent else 1, 3)
    num_after = num_before if is_dependent else chance.randint(1, 3)
    kill = chance.choice(("SIGKILL", "SIGTERM")), chance.randrange(num_before), chance.randint(2, NUM_UPDATES - 2)
    said = f"{features}, {kill}, {num_before} ranks, then {num_after}"
    (expected, *_) = launch(num_before if is_dependent else 1, train, features, None, None)
    try:
        (found, *_) = launch(num_before, train, features, tmp_path, kill)
        is_resumed = False
    except RankError:
        shutil.rmtree(tmp_path / "staging", ignore_errors=True)
        (found, *_) = launch(num_after, train, features, tmp_path, None)
        is_resumed = True
    num_left, num_all = len(found["losses"]), len(expected["losses"])
    if kill[0] == "SIGKILL":  # may come before the first checkpoint is written, which happens beside the training
        assert is_resumed, said
        assert 0 < num_left <= num_all, said
    else:  # is seen up to 32 updates later, by a run that may have made its last one
        assert num_left < num_all or not is_resumed, said
    assert found["losses"] == pytest.approx(expected["losses"][num_all - num_left :], rel=1e-9), said
    assert found["metric"] == pytest.approx(expected["metric"], rel=1e-9), said
    assert found["lr"] == expected["lr"], said
    for kind in ("weights", "average"):
        for name, weight in (expected[kind] or {}).items():
            assert torch.allclose(found[kind][name], weight, rtol=1e-9, atol=1e-10), f"{kind} {name}: {said}"
    if features.tracks_per_rank:
        assert found["seen"] == expected["seen"], said
