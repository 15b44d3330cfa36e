# SPDX-License-Identifier: Apache-2.0
"""Projects whose samples come in an order of their own: buckets by length, weights, a stream with workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from tests.dist.projects.language import LENGTHS, PackedLSTM, Sequences, packed_error, pad
from tests.dist.projects.supervised import (
    GLOBAL_BATCH_SIZE,
    NUM_SAMPLES,
    Losses,
    Numbers,
    Project,
    Supervised,
    draw,
    make_loop,
    order_of,
    sgd,
    state_of,
    update,
)


class Buckets(Sampler[list[int]]):
    """Batches of samples of about the same length, in another order in each epoch; of 7, 7, 7, 7 and 1 samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called where the batches of an epoch begin."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)

    def __iter__(self) -> Iterator[list[int]]:
        order = LENGTHS.argsort(stable=True).tolist()
        batches = [order[start : start + GLOBAL_BATCH_SIZE] for start in range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE)]
        shuffled = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.epoch))
        return iter([batches[number] for number in shuffled])


def bucketed_batches(epoch: int) -> DataLoader[Any]:
    """The DataLoader as it is."""
    buckets = Buckets()
    buckets.set_epoch(epoch)
    return DataLoader(Sequences(), batch_sampler=buckets, collate_fn=pad)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are made one after the other."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(NUM_SAMPLES):
            x = torch.linspace(-1, 1, 4, dtype=torch.float64) * (number + 1) / NUM_SAMPLES
            yield x, x.square().sum()


def make_regressor(width: int = 4) -> nn.Module:
    """A number for each row."""
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def error(model: nn.Module, batch: Any) -> Losses:
    """A mean over samples."""
    x, y = batch
    return {"error": functional.mse_loss(model(x), y)}


class TwoDomains:
    """Two datasets of one length, each passed over in each epoch of a loop over `range`."""

    def by_hand(self) -> Numbers:
        """Both have the order of the epoch."""
        torch.manual_seed(1)
        model = make_regressor()
        optimizer, losses = sgd(model.parameters()), []
        for epoch in range(2):
            for x in (X, X + 1):
                for numbers in order_of(epoch):
                    loss = functional.mse_loss(model(x[numbers]), x[numbers].square().sum(1))
                    update(loss, optimizer)
                    losses.append(loss.detach())
        return {"losses": losses, "state": state_of(model)}

    def with_loop(self) -> Numbers:
        """A further pass over the same data is the next epoch; the other data are no such pass."""
        loop = make_loop()
        torch.manual_seed(1)
        plain = make_regressor()
        model, optimizer = loop.prepare(plain, sgd(plain.parameters()))
        domains = [TensorDataset(x, x.square().sum(1)) for x in (X, X + 1)]
        loaders = [loop.loader(data, global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True) for data in domains]
        losses = []
        for _ in range(2):
            for loader in loaders:
                for batch in loop.batches(loader):
                    with loop.accumulate(model):
                        (loss,) = error(model, batch).values()
                        loop.backward(loss)
                    losses.append(loop.reduce(loss))
                    loop.step(optimizer)
        return {"losses": losses, "state": state_of(model)}


WEIGHTS = torch.linspace(0.1, 3, NUM_SAMPLES).tolist()
X = draw(NUM_SAMPLES, 4)
PROJECTS: dict[str, Project] = {
    "bucketed batches": Supervised(
        make_model=PackedLSTM,
        losses=packed_error,
        dataset=Sequences(),
        batches=bucketed_batches,
        make_loader=lambda loop: loop.prepare_data_loader(bucketed_batches(0)),
    ),
    "weighted samples": Supervised(
        make_model=make_regressor,
        losses=error,
        dataset=TensorDataset(X, X.square().sum(1)),
        loader_options={"weights": WEIGHTS, "num_draws": 20, "shuffle": False},
    ),
    "stream with workers": Supervised(
        make_model=make_regressor,
        losses=error,
        dataset=Stream(),
        batches=lambda epoch: DataLoader(Stream(), batch_size=GLOBAL_BATCH_SIZE),
        make_loader=lambda loop: loop.loader(Stream(), global_batch_size=GLOBAL_BATCH_SIZE, num_workers=2),
    ),
    "two domains in turn": TwoDomains(),
}
