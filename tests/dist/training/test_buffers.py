# SPDX-License-Identifier: Apache-2.0
"""Buffers that the forward pass updates: as in one process where that can be, and a finding where ranks differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import spectral_norm

from ddpilot.data.global_batches import Plan
from ddpilot.group.init_group import seed_all
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from tests.dist.training.bodies import launch
from tests.dist.training.test_losses import BATCH_SIZE, NUM_EPOCHS, NUM_SAMPLES, make_data
from tests.soak import often


class Counting(nn.Module):
    """Anneals by a counter of its own forward passes; does not run on zero rows where `needs_rows`."""

    def __init__(self, *, needs_rows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.needs_rows = needs_rows
        self.num_steps: torch.Tensor
        self.register_buffer("num_steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 6)."""
        if self.training:
            self.num_steps += 1
        if self.needs_rows:
            x = x.view(len(x), -1)
        return torch.as_tensor(self.last(torch.tanh(self.first(x) / (1 + 0.3 * self.num_steps))))


class Remembering(nn.Module):
    """Keeps the mean of its inputs in three buffers: one that is saved, one that is not, and BatchNorm's."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 1), nn.BatchNorm1d(6, affine=False)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 6)."""
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.norm(x)
        return torch.as_tensor(self.linear(x))


def make_models() -> list[nn.Module]:
    """Those of which one process and several have the same numbers."""
    normed = [spectral_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1))]
    return [Counting(needs_rows=False), Counting(needs_rows=True), nn.Sequential(*normed)]


def train_plain() -> list[torch.Tensor]:
    """Weights and buffers of each model, of one process."""
    torch.set_default_dtype(torch.float64)
    seed_all(0)
    data, found = make_data(), []
    plan = Plan(num_samples=NUM_SAMPLES, global_batch_size=BATCH_SIZE, world_size=1, shuffle=True)
    for model in make_models():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(NUM_EPOCHS):
            for ids in torch.as_tensor(plan.order(epoch).copy()).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
                x, y, _ = data[ids]
                mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        found.append(flatten(model))
    return found


def train_with_loop() -> list[torch.Tensor]:
    """The same with a `Loop`."""
    torch.set_default_dtype(torch.float64)
    seed_all(0)
    models = make_models()
    return [train(model)[0] for model in models]


def train(inner: nn.Module, **options: Any) -> tuple[torch.Tensor, list[str]]:
    """Weights and buffers on this rank, and codes of findings; the last batch of an epoch is left by `break`."""
    loop = Loop(progress=False)
    model, optimizer = loop.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1), **options)
    loader = loop.loader(make_data(), global_batch_size=BATCH_SIZE, shuffle=True)
    is_normed = any(isinstance(layer, nn.BatchNorm1d) for layer in inner.modules())
    if is_normed:
        loader = loop.loader(make_data(), global_batch_size=BATCH_SIZE, drop_last=True)
    for _ in range(NUM_EPOCHS):
        for x, y, _ in loop.batches(loader):
            loop.backward(mse_loss(model(x), y))
            loop.step(optimizer)
            if loop.batch is not None and loop.batch.global_count == 1:
                break
    if not is_normed:
        list(loop.batches(loader))  # what the last batch left is settled where the next pass begins
    return flatten(unwrap(model)), [one.code for one in loop.findings if one.code != "DDP501"]


def flatten(model: nn.Module) -> torch.Tensor:
    """All that the model would save."""
    return torch.cat([value.reshape(-1) for value in model.state_dict().values()])


@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_buffers_train_as_in_one_process(num_ranks: int) -> None:
    """A counter and a power iteration, on all ranks, though some ranks have no sample of the last batch."""
    (expected,) = launch(1, train_plain)
    for ranks in launch(num_ranks, train_with_loop):
        for seen, plain in zip(ranks, expected, strict=True):
            assert torch.allclose(seen, plain, rtol=1e-10, atol=1e-12)


def find() -> list[list[str]]:
    """Codes of findings, of four models."""
    torch.set_default_dtype(torch.float64)
    return [
        train(Remembering(persistent=True))[1],
        train(Remembering(persistent=False))[1],
        train(Remembering(persistent=True), forward_sync_buffers=True)[1],
        train(Counting(needs_rows=False))[1],
    ]


def test_buffers_that_differ_between_ranks_are_found_once() -> None:
    """Not those that are not saved, that DDP sends, or that norms have; nor those that are alike."""
    assert list(launch(2, find)) == [[["DDP506"], [], [], []]] * 2
