# SPDX-License-Identifier: Apache-2.0
"""What people put around a model gives the same numbers at any world size too; and other kinds of data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from benchmarks.small_models import make_data, make_model
from ddpilot import RankError
from ddpilot.errors import DataError
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from tests.dist.training.bodies import launch

OPTIONS: dict[str, dict[str, Any]] = {
    "averaged": {},
    "checkpointed": {},
    "checkpointed the old way": {"static_graph": True},
    "compiled": {},
    "compiled after prepare": {},
    "late branch": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "sharded loader": {},
    "batch norm in eval": {},
    "no zero rows": {},
    "no zero rows, compiled": {},
}
"""Each variant with what `prepare` is given."""


class Checkpointed(nn.Module):
    """Computes its inner layers again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), make_model("mlp"), nn.Linear(5, 5)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 8)."""
        return torch.as_tensor(self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)))


class LateBranch(nn.Module):
    """Its second layer is used where a batch has no sample too, but not in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 5), nn.Linear(5, 5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 8)."""
        self.calls += 1
        return torch.as_tensor(self.second(self.first(x)) if self.calls % 2 else self.first(x))


class NeedsRows(nn.Module):
    """Reshapes and packs in ways that fail on zero rows, as models of language do, and gives out a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rnn = make_model("mlp"), nn.LSTM(5, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: (samples, 8)."""
        steps = self.inner(x.view(len(x), -1))[:, None].expand(-1, 3, -1)
        packed = nn.utils.rnn.pack_padded_sequence(steps, torch.full((len(x),), 2), batch_first=True)
        return {"logits": nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][:, -1]}


class Logits(nn.Module):
    """What of its model's output the loss takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 8)."""
        return torch.as_tensor(self.model(x)["logits"])


def make_variant(variant: str) -> nn.Module:
    """The model of a variant."""
    if variant.startswith("checkpointed"):
        return Checkpointed(use_reentrant=variant.endswith("the old way"))
    if variant == "late branch":
        return LateBranch()
    if variant.startswith("no zero rows"):
        model: Any = Logits(NeedsRows())
        return torch.compile(model, backend="eager") if variant.endswith("compiled") else model  # type: ignore[return-value]
    model = make_model("mlp")
    if variant == "batch norm in eval":
        model = nn.Sequential(nn.BatchNorm1d(8).eval(), model)
    return torch.compile(model, backend="eager") if variant == "compiled" else model  # type: ignore[return-value]


def train_variant(variant: str) -> list[float]:
    """The weights after two epochs and the metric of the model that is evaluated."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(seed=4, accumulate=2)
    model: Any = make_variant(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = get_ema_multi_avg_fn(0.5)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(model, multi_avg_fn=ema) if variant == "averaged" else None
    model, optimizer = loop.prepare(model, optimizer, **OPTIONS[variant])
    if variant == "compiled after prepare":
        model = torch.compile(model, backend="eager")
    data = make_data("mlp", 25)
    loader = loop.loader(data, global_batch_size=12)
    if variant == "sharded loader":
        loader = loop.prepare_data_loader(DataLoader(data, batch_size=12))
    for _ in loop.epochs(2):
        for x, y in loop.batches(loader):
            with loop.accumulate(model):
                loop.backward(nn.functional.cross_entropy(model(x), y))
            if loop.step(optimizer) and averaged is not None:
                averaged.update_parameters(unwrap(model))
    shown = averaged or model
    accuracy = loop.evaluate(shown, loader, {"p": lambda out, y: out.softmax(-1).amax(-1)})["p"]
    return [*torch.cat([p.detach().reshape(-1) for p in shown.parameters()]).tolist(), accuracy]


def train_variants() -> dict[str, list[float]]:
    """All of them, one after the other in one group."""
    return {variant: train_variant(variant) for variant in OPTIONS}


def test_variants_give_the_same_numbers_at_any_world_size(capfd: pytest.CaptureFixture[str]) -> None:
    """EMA, gradient checkpointing, torch.compile, unused parameters, a static graph; also a rank without samples."""
    (alone,), together = launch(1, train_variants), launch(2, train_variants)
    for learnt in together:
        for variant, numbers in alone.items():
            assert learnt[variant] == pytest.approx(numbers, rel=1e-10), variant
    assert alone["averaged"] != pytest.approx(alone["sharded loader"], rel=1e-3)


class Stream(IterableDataset[torch.Tensor]):
    """Every part gives a number of samples of its own: part p has p + 1 batches of two, and one sample more."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        part = 0 if info is None else info.id
        for number in range(2 * (part + 1) + 1):
            yield torch.tensor([part, number], dtype=torch.float64)


def train_on_stream() -> Any:
    """What each rank saw, the model at the end, as `prepare` returned it, and the metric."""
    loop = Loop(seed=1, accumulate=2)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(Stream(), batch_size_per_rank=2, divides_itself=True)
    counts, updates = [], 0
    for x in loop.batches(loader):
        with loop.accumulate(model):
            loop.backward(model(x).pow(2).mean())
        counts.append(len(x))
        updates += loop.step(optimizer)
    total = loop.evaluate(model, loader, {"number": lambda x: x[:, 1]}, forward=lambda model, x: (x,))
    return counts, updates, {"model": model}, total


def test_streams_that_end_unequally_end_together() -> None:
    """Ranks with 3, 5 and 7 samples make the same updates, the last of which two ranks have no sample for.

    The models come back out of DDP, trained, as from one rank.
    """
    results = launch(3, train_on_stream)
    assert [counts for counts, *_ in results] == [[2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    for _, updates, returned, total in results:
        assert updates == 2
        assert type(returned["model"]) is nn.Linear
        assert torch.equal(returned["model"].weight, results[0][2]["model"].weight)
        assert total["number"] == pytest.approx((3 + 10 + 21) / 15)


def train_on_unequal_datasets() -> None:
    """Rank 1 has lost a file."""
    loop = Loop()
    data = TensorDataset(torch.ones(8 - loop.rank, 2))
    for _ in loop.batches(loop.loader(data, global_batch_size=4)):
        pass


def test_ranks_with_unequal_datasets_are_told_before_the_epoch() -> None:
    """Rather than train on other batches without a word."""
    with pytest.raises(RankError, match="ranks 1 would read different batches than rank 0") as caught:
        launch(2, train_on_unequal_datasets)
    assert isinstance(caught.value.__cause__, DataError)


class OwnShare(IterableDataset[torch.Tensor]):
    """Reads the rank itself, as people write them, and says nothing of it."""

    def __init__(self, num_samples: list[int]) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = int(os.environ["RANK"])
        return iter(torch.arange(self.num_samples[rank] * 2.0).reshape(-1, 2) * 2 + rank)


def train_on_own_shares() -> list[str]:
    """What each way to use such a dataset says."""
    loop = Loop()
    model = loop.prepare(nn.Linear(2, 1))

    def train(**options: Any) -> None:
        for x in loop.batches(loop.loader(global_batch_size=4, **options)):
            loop.backward(model(x).mean())

    equal = OwnShare([8, 8])
    ways: list[Any] = [
        lambda: train(dataset=OwnShare([8, 16])),
        lambda: train(dataset=equal),
        lambda: train(dataset=equal, num_workers=1),
        lambda: loop.evaluate(model, loop.loader(equal, global_batch_size=4), {"x": len}),
        lambda: loop.predict(model, loop.loader(equal, global_batch_size=4)),
    ]
    said = []
    for way in ways:
        with pytest.raises(DataError) as caught:
            way()
        said.append(str(caught.value))
    return said


def test_ranks_with_streams_of_their_own_are_told_and_lose_no_samples() -> None:
    """Unequal ones would wait for each other; of equal ones, half of the samples would be lost without a word."""
    for rank, (unequal, *equal) in enumerate(launch(2, train_on_own_shares)):
        assert "for the next update rank 0 " in unequal
        for text in equal:
            assert text.startswith(f"[rank {rank}] reading a stream in epoch ")
            assert ": the ranks do not read the same stream" in text
            assert "rank 0 4 samples, the first [0, 2]; rank 1 4 samples, the first [1, 3]" in text
            assert "yield every sample on every rank" in text
            assert "`divides_itself=True`" in text
