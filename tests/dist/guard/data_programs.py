# SPDX-License-Identifier: Apache-2.0
"""Programs that train on data with a mistake, and correct ones that look alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

BATCH = 4


def my_rank() -> int:
    """The rank that runs this."""
    return int(os.environ["RANK"])


def make_data(num_samples: int = 64) -> TensorDataset:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(num_samples, 3, generator=generator), torch.randn(num_samples, 1, generator=generator)
    )


def make_model(*layers: nn.Module) -> DistributedDataParallel:
    """A small one."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1)))


def loss_of(model: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The mean of squares."""
    return nn.functional.mse_loss(model(x), y)


def train(model: DistributedDataParallel, loader: Any, num_epochs: int = 1, sampler: Any = None) -> None:
    """As everybody does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def divided(data: Any, **options: Any) -> DataLoader[Any]:
    """A loader of this rank's part."""
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, **options))


def train_right(folder: Path) -> None:
    """Epochs as they should be, with validation on unpadded parts; two loaders, one with workers."""
    data = make_data(62)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    model = make_model()
    train(model, DataLoader(data, BATCH, sampler=sampler, num_workers=1), 2, sampler)
    train(model, DataLoader(data, BATCH, sampler=sampler), 2, sampler)
    part = Subset(data, range(my_rank(), len(data), dist.get_world_size()))
    model.eval()
    with torch.no_grad():
        sums = torch.zeros(2)
        for x, _ in DataLoader(part, BATCH):
            sums += torch.tensor([model.module(x).sum(), len(x)])
    dist.all_reduce(sums)


def read_the_same(folder: Path) -> None:
    """No sampler at all, in order."""
    train(make_model(), DataLoader(make_data(), BATCH))


def take_part_of_the_same(folder: Path) -> None:
    """Every rank loads all, and takes its rows."""
    model = make_model()
    for x, y in DataLoader(make_data(), BATCH):
        rows = slice(my_rank(), None, dist.get_world_size())
        loss_of(model, x[rows], y[rows]).backward()


def train_on_constants(folder: Path) -> None:
    """Made-up data that is the same everywhere, and always."""
    train(make_model(), [(torch.ones(BATCH, 3), torch.zeros(BATCH, 1))] * 12)


def forget_set_epoch(folder: Path) -> None:
    """The same order twice."""
    train(make_model(), divided(make_data()), 2)


def validate_twice(folder: Path) -> None:
    """A sampler that shuffles an evaluation in the same way each time: no fault. One batch was looked at before."""
    data = make_data()
    loader = divided(data)
    model = make_model()
    next(iter(loader))
    train(model, loader, 1)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            for x, _y in loader:
                model.module(x)


def shuffle_by_rank(folder: Path) -> None:
    """The samplers' seeds differ, so that the parts overlap."""
    data = make_data()
    train(make_model(), divided(data, seed=my_rank()))


def read_all_shuffled(folder: Path) -> None:
    """No sampler, and each rank in an order of its own."""
    train(make_model(), DataLoader(make_data(), BATCH, shuffle=True))


def read_own_parts_shuffled(folder: Path) -> None:
    """Each rank has a dataset of its own, numbered from 0."""
    data = make_data()
    train(make_model(), DataLoader(Subset(data, range(my_rank(), len(data), 2)), BATCH, shuffle=True))


def train_unequally(folder: Path) -> None:
    """One batch more on rank 0, which is not got to here: that would hang."""
    part = Subset(make_data(), range(20) if my_rank() else range(20, 44))
    model = make_model()
    for number, (x, y) in enumerate(DataLoader(part, BATCH)):
        if number < 5:
            loss_of(model, x, y).backward()


def train_unequally_joined(folder: Path) -> None:
    """As it should be done."""
    part = Subset(make_data(), range(20) if my_rank() else range(20, 44))
    model = make_model()
    with Join([model]):
        for x, y in DataLoader(part, BATCH):
            loss_of(model, x, y).backward()


def train_unequally_agreed(folder: Path) -> None:
    """The ranks agree on the number of batches."""
    part = Subset(make_data(), range(20) if my_rank() else range(20, 44))
    loader = DataLoader(part, BATCH)
    least = torch.tensor(len(loader))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    model = make_model()
    for _, (x, y) in zip(range(int(least)), loader, strict=False):
        loss_of(model, x, y).backward()


def evaluate_padded(folder: Path) -> None:
    """Of 61 samples one comes twice."""
    data = make_data(61)
    model = make_model()
    train(model, divided(data), 1)
    model.eval()
    with torch.no_grad():
        total = torch.zeros(2)
        for x, y in divided(data, shuffle=False):
            total += torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum"), len(x)])
    dist.all_reduce(total)


def predict_padded_and_cut(folder: Path) -> None:
    """All predictions are gathered, and those of the padding are cut off."""
    data = make_data(61)
    model = make_model().eval()
    with torch.no_grad():
        mine = torch.cat([model.module(x) for x, _ in divided(data, shuffle=False)])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    torch.stack(found, 1).reshape(-1, 1)[: len(data)].mean()


def average_accuracies(folder: Path) -> None:
    """The mean of two ratios, of 13 and of 7 samples."""
    _accuracy(weighted=False)


def average_counts(folder: Path) -> None:
    """Correct ones and all ones are summed."""
    _accuracy(weighted=True)


def average_gathered_accuracies(folder: Path) -> None:
    """As objects, which are averaged then."""
    gathered: list[Any] = [None, None]
    correct, count = _evaluate()
    dist.all_gather_object(gathered, correct / count)
    assert sum(gathered) / 2 > 0


def average_gathered_metrics(folder: Path) -> None:
    """As objects with several of them by name, which are averaged one by one."""
    gathered: list[Any] = [None, None]
    correct, count = _evaluate()
    mine = {"loss": torch.tensor(0.25), "accuracy": correct / count}
    dist.all_gather_object(gathered, mine)
    assert all(sum(each[name] for each in gathered) / 2 > 0 for name in mine)


def show_gathered_accuracies(folder: Path) -> None:
    """Each by itself; and averaged with the counts as weights, which come in the same objects or in others."""
    each: list[Any] = [None, None]
    correct, count = _evaluate()
    dist.all_gather_object(each, correct / count)
    assert len(each) == 2
    both: list[Any] = [None, None]
    correct, count = _evaluate()
    dist.all_gather_object(both, (correct / count, count))
    accuracies: list[Any] = [None, None]
    counts: list[Any] = [None, None]
    correct, count = _evaluate()
    dist.all_gather_object(accuracies, correct / count)
    dist.all_gather_object(counts, count)
    assert sum(accuracies) > 0
    named: list[Any] = [None, None]
    correct, count = _evaluate()
    dist.all_gather_object(named, {"correct": correct, "loss": correct / count, "count": count})
    assert sum(each["correct"] for each in named) / sum(each["count"] for each in named) > 0


def _accuracy(weighted: bool) -> None:
    correct, count = _evaluate()
    for value in (correct, count) if weighted else (correct / count,):
        dist.all_reduce(torch.tensor(value))


def _evaluate() -> tuple[float, float]:
    part = Subset(make_data(), range(13) if my_rank() else range(13, 20))
    model = make_model().eval()
    with torch.no_grad():
        for x, _ in DataLoader(part, BATCH):
            model.module(x)
    return (5.0, 13.0) if my_rank() else (3.0, 7.0)


def drop_alike(folder: Path) -> None:
    """Seeded alike before the model, and not after."""
    torch.manual_seed(0)
    train(make_model(nn.Dropout(0.5)), divided(make_data()))


def drop_alike_compiled(folder: Path) -> None:
    """As before, of a model that torch compiles."""
    torch.manual_seed(0)
    model = make_model(nn.Dropout(0.5))
    compiled: Any = torch.compile(model, backend="eager")
    for x, y in divided(make_data()):
        loss_of(compiled, x, y).backward()


def seed_alike_without_draws(folder: Path) -> None:
    """Seeded alike, which is right: nothing is drawn while it trains."""
    torch.manual_seed(0)
    data = make_data()
    train(make_model(), divided(data))


class Augmented(Dataset[Any]):
    """Adds noise to its samples."""

    def __init__(self) -> None:
        self._data = make_data()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        x, y = self._data[number]
        return x + float(np.random.normal()), y


def augment_alike(folder: Path) -> None:
    """numpy is seeded alike, and samples are read in the ranks."""
    np.random.seed(3)
    train(make_model(), divided(Augmented()))


def seed_workers_alike(worker: int) -> None:
    """A constant, of which every worker makes the same."""
    np.random.seed(5)


def augment_alike_in_workers(folder: Path) -> None:
    """Each worker of each rank has the same numbers."""
    data = Augmented()
    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": seed_workers_alike}
    train(make_model(), DataLoader(data, BATCH, sampler=DistributedSampler(data), **options))


def add_noise_alike(folder: Path) -> None:
    """Seeded alike before the model, and noise is added to what the loader gave."""
    torch.manual_seed(0)
    _add_noise()


def _add_noise() -> None:
    model = make_model()
    for x, y in divided(make_data()):
        loss_of(model, x + torch.randn_like(x), y).backward()


def choose_size_alike(folder: Path) -> None:
    """Seeded alike, for one choice in each step that all ranks have to share."""
    torch.manual_seed(0)
    model = make_model()
    for x, y in divided(make_data()):
        loss_of(model, x * torch.randint(1, 4, ()), y).backward()


def add_noise_apart(folder: Path) -> None:
    """Seeded by rank, as `run_all` does."""
    _add_noise()


def probe_on_one_rank(folder: Path) -> None:
    """Rank 0 reads the whole dataset first, with a copy that it throws away, as to find a learning rate."""
    data, model = make_data(), nn.Linear(3, 1)
    if not my_rank():
        for x, _y in DataLoader(data, BATCH):
            model(x).sum().backward()
    train(make_model(), divided(data))


def look_on_one_rank(folder: Path) -> None:
    """Rank 0 evaluates first, of more batches, in the loop that trains; only the model's call is without gradients."""
    data, model = make_data(), make_model()
    for is_evaluation in (True, False) if not my_rank() else (False,):
        for x, y in DataLoader(data, 2) if is_evaluation else divided(data):
            with torch.set_grad_enabled(not is_evaluation):
                loss = loss_of(model.module if is_evaluation else model, x, y)
            if not is_evaluation:
                loss.backward()


def split_by_rank(folder: Path) -> None:
    """Each rank splits the dataset in its own way, and the samplers divide what came out."""
    part, _ = random_split(make_data(), [40, 24])
    train(make_model(), divided(part))


def split_alike(folder: Path) -> None:
    """The same, with one seed."""
    part, _ = random_split(make_data(), [40, 24], torch.Generator().manual_seed(0))
    train(make_model(), divided(part))


def augment_apart(folder: Path) -> None:
    """Seeded by rank; in workers by torch."""
    np.random.seed(my_rank())
    data = Augmented()
    train(make_model(nn.Dropout(0.5)), divided(data))
    train(make_model(), DataLoader(data, BATCH, sampler=DistributedSampler(data), num_workers=2))


def normalise_few(folder: Path) -> None:
    """Four samples on each rank."""
    train(make_model(nn.BatchNorm1d(8)), divided(make_data()))


def normalise_many(folder: Path) -> None:
    """32 on each, and a last batch that is smaller; and a frozen one on few."""
    data = make_data(144)
    model = make_model(nn.BatchNorm1d(8))
    train(model, DataLoader(data, 32, sampler=DistributedSampler(data)))
    frozen = make_model(nn.BatchNorm1d(8))
    frozen.module[1].eval()
    train(frozen, divided(data))


def divide_by_zero(folder: Path) -> None:
    """On rank 1, in its third batch."""
    data = make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(divided(data)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if my_rank() == 1 and number == 2:
            loss = loss / torch.zeros(())
        loss.backward()
        optimizer.step()


def take_root_of_zero(folder: Path) -> None:
    """The loss is finite, its gradient is not: on rank 0, in the second batch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(divided(make_data())):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if my_rank() == 0 and number == 1:
            loss = loss + (loss * 0).sqrt()
        loss.backward()
        optimizer.step()


def stop_at_a_bad_loss(folder: Path) -> None:
    """As before, and the program ends by itself when it sees what came of it: no backward follows."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(divided(make_data())):
        loss = loss_of(model, x, y)
        if not loss.isfinite():
            break
        if my_rank() == 0 and number == 2:
            loss = loss + (loss * 0).sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def leave_out_bad_steps(folder: Path) -> None:
    """A loss that is not finite, and no step with it, as with a scaler."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(divided(make_data())):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        (loss * (float("inf") if number == 2 else 1.0)).backward()
        if all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None):
            optimizer.step()


def reduce_before_backward(folder: Path) -> None:
    """The gradient is that of the rank's own loss."""
    model = make_model()
    for x, y in divided(make_data()):
        loss = loss_of(model, x, y)
        dist.all_reduce(loss)
        (loss / 2).backward()


def sum_with_graphs(folder: Path) -> None:
    """The losses of an epoch are added with their graphs."""
    model = make_model()
    total = torch.zeros(())
    for x, y in divided(make_data()):
        loss = loss_of(model, x, y)
        loss.backward()
        total = total + loss
    dist.all_reduce(total)


def reduce_after_backward(folder: Path) -> None:
    """For a log: nothing is wrong with the numbers."""
    model = make_model()
    for x, y in divided(make_data()):
        loss = loss_of(model, x, y)
        loss.backward()
        dist.all_reduce(loss)
        total = loss.detach().clone()
        dist.all_reduce(total)


def mix_devices(folder: Path) -> None:
    """The target is on another device."""
    model = make_model()
    target = torch.zeros(BATCH, 1, device="meta")
    for x, _y in divided(make_data()):
        output = model(x)
        try:
            nn.functional.mse_loss(output, target)
        except RuntimeError as error:
            import traceback

            traceback.TracebackException.from_exception(error)
            return


def save_everywhere(folder: Path) -> None:
    """All ranks to one file."""
    torch.save(make_model().state_dict(), folder / "all.pt")


def save_apart(folder: Path) -> None:
    """Rank 0 alone, and each its own."""
    if my_rank() == 0:
        torch.save({"a": 1}, folder / "zero.pt")
    torch.save({"a": 1}, folder / f"own{my_rank()}.pt")


class Stream(IterableDataset[Any]):
    """Numbers of one rank, or the same of all."""

    def __init__(self, start: int) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._start, self._start + 40):
            yield torch.full((3,), number / 100), torch.zeros(1)


def stream_the_same(folder: Path) -> None:
    """Nobody divides the stream."""
    train(make_model(), DataLoader(Stream(0), BATCH))


def stream_own_parts(folder: Path) -> None:
    """Each rank has its own."""
    train(make_model(), DataLoader(Stream(100 * my_rank()), BATCH))


FAILING = {
    "DDP401": (read_the_same, stream_the_same),
    "DDP402": (forget_set_epoch,),
    "DDP403": (shuffle_by_rank, read_all_shuffled, split_by_rank),
    "DDP404": (train_unequally,),
    "DDP405": (evaluate_padded,),
    "DDP406": (average_accuracies, average_gathered_accuracies, average_gathered_metrics),
    "DDP407": (drop_alike, drop_alike_compiled, augment_alike, augment_alike_in_workers, add_noise_alike),
    "DDP408": (normalise_few,),
    "DDP409": (divide_by_zero, take_root_of_zero, stop_at_a_bad_loss),
    "DDP410": (reduce_before_backward, sum_with_graphs),
    "DDP412": (mix_devices,),
    "DDP603": (save_everywhere,),
}
RIGHT = (
    train_right,
    take_part_of_the_same,
    train_on_constants,
    validate_twice,
    read_own_parts_shuffled,
    train_unequally_joined,
    train_unequally_agreed,
    predict_padded_and_cut,
    average_counts,
    show_gathered_accuracies,
    seed_alike_without_draws,
    augment_apart,
    add_noise_apart,
    choose_size_alike,
    look_on_one_rank,
    probe_on_one_rank,
    split_alike,
    normalise_many,
    leave_out_bad_steps,
    reduce_after_backward,
    save_apart,
    stream_own_parts,
)
