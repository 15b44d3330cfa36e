# SPDX-License-Identifier: Apache-2.0
"""What the ranks of these tests run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import ddpilot
from benchmarks.same_training import Learnt, train_with_loop
from benchmarks.small_models import loss_fn, make_data
from ddpilot.training.loop import Loop
from tests.preload import PRELOAD

LIMIT_S = 600 if os.environ.get("DDPILOT_SOAK") else 100
SHARES = {2: [2.0, 1.0], 4: [3.0, 1.0, 2.0, 1.0]}
UPDATES_PER_EPOCH = 4
KINDS = ("mlp", "cnn", "gpt")


def launch(num_ranks: int, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """What every rank returned, in at most `LIMIT_S` seconds."""
    return make_launcher(num_ranks).run(fn, *args, **kwargs)


def launch_unwatched(num_ranks: int, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The same where nobody watches: ranks record by themselves, or show what happens to those that nobody watches."""
    return make_launcher(num_ranks, watch=False).run(fn, *args, **kwargs)


def make_launcher(num_ranks: int, *, watch: bool = True) -> ddpilot.Launcher:
    """What `launch` runs functions with."""
    return ddpilot.Launcher(nproc_per_node=num_ranks, timeout_s=LIMIT_S, preload=PRELOAD, watch=watch)


def train_all(num_updates: dict[torch.dtype, int]) -> dict[torch.dtype, dict[str, Learnt]]:
    """Each kind of model in each precision, with ragged batches, short groups, unequal shares and clipping."""
    found = {}
    for dtype, num in num_updates.items():
        torch.set_default_dtype(dtype)
        found[dtype] = {kind: train_with_loop(kind, num // UPDATES_PER_EPOCH, batch_split=SHARES) for kind in KINDS}
    return found


def train_with_dropout(seed: int, num_epochs: int, rate: float) -> float:
    """The mean loss of the last epoch, which dropout is a part of."""
    loop = Loop(seed=seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, 5))
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = make_data("mlp")
    loader = loop.loader(data, global_batch_size=40, shuffle=True)
    total = torch.zeros(())
    for _ in loop.epochs(num_epochs):
        total.zero_()
        for x, y in loop.batches(loader):
            loss = loss_fn(model(x), y)
            loop.backward(loss)
            loop.step(optimizer)
            total += loss.detach() * len(x)
    return loop.reduce(total, "sum").item() / len(data)


def train_seeds(num_seeds: int, num_epochs: int, rate: float = 0.5) -> list[float]:
    """The last losses of as many seeds."""
    return [train_with_dropout(seed, num_epochs, rate) for seed in range(num_seeds)]


def assert_same(found: Any, expected: Any, but: tuple[str, ...] = ()) -> None:
    """Dictionaries, but for these keys, and lists of tensors and numbers, to 1e-10."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key in expected.keys() - set(but):
            assert_same(found[key], expected[key], but)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, but)
    elif torch.is_tensor(expected):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    else:
        assert found == (pytest.approx(expected, rel=1e-10) if isinstance(expected, float) else expected)
