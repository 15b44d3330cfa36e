# SPDX-License-Identifier: Apache-2.0
"""Every sample once, in order: metrics and predictions of datasets of any length on 1 to 4 ranks."""

from __future__ import annotations

import ctypes
import os
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ddpilot import FakeGroup, RankError
from ddpilot.errors import LoopError
from ddpilot.training.evaluation.evaluate import read_predictions
from ddpilot.training.loop import Loop
from tests.conftest import CHILDREN, TORCHMETRICS_ALONE
from tests.dist.training.bodies import launch
from tests.soak import often

SIZES = (21, 1, 0, 201)


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Sample i is (i as a tensor of one number, i)."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(number)], dtype=torch.float64), number


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """The same, one after the other."""

    def __init__(self, num_samples: int) -> None:
        self._samples = Numbers(num_samples)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return (self._samples[number] for number in range(len(self._samples)))


class Doubling(nn.Module):
    """Twice the input; refuses batches of no rows, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(1)  # not used: something with buffers and with modes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 1)."""
        return x.view(len(x), -1) * self.weight


def numbers_seen(metrics: Any = None) -> dict[int, Any]:
    """For each size: metrics that count and add up, and predictions in each of the forms that are allowed."""
    loop = Loop()
    model = loop.prepare(Doubling())
    model.eval()
    model.train()
    found: dict[int, Any] = {}
    forms = {
        "tensor": None,
        "tuple": lambda m, batch: (m(batch[0]), batch[1]),
        "dict": lambda m, batch: {"y": m(batch[0]), "ids": batch[1]},
        "objects": lambda m, batch: [f"sample {number}" for number in batch[1].tolist()],
    }
    for size in SIZES:
        loader = loop.loader(Numbers(size), global_batch_size=8)
        sums = {"mean": lambda y, ids: y, "even": lambda y, ids: (ids % 2 == 0).double().mean()}
        found[size] = {
            "metrics": loop.evaluate(model, loader, sums),
            **{form: loop.predict(model, loader, forward=forward) for form, forward in forms.items()},
            "everywhere": loop.predict(model, loader, on_all_ranks=True),
            "training": model.training,
        }
        if size == 21:
            found[size]["singly"] = loop.evaluate(model, DataLoader(Numbers(size)), sums)
            found[size]["singly everywhere"] = loop.predict(model, DataLoader(Stream(size)), on_all_ranks=True)
    return found


@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_evaluate_and_predict_take_each_sample_once_in_order(num_ranks: int) -> None:
    """21, 1, 0 and 201 samples: exactly those, in each form of output, on rank 0, or on all where asked.

    A plain DataLoader's batches may be of one sample, which leaves the other ranks without any.
    """
    for rank, found in enumerate(launch(num_ranks, numbers_seen)):
        for size, seen in found.items():
            ids = torch.arange(size)
            metrics = seen["metrics"]
            assert metrics["mean"] == pytest.approx(float(size - 1), rel=1e-12, nan_ok=True) if size else True
            assert metrics["even"] == pytest.approx((size + 1) // 2 / size, rel=1e-12) if size else True
            assert size or all(value != value for value in metrics.values())
            assert seen["training"]
            if not size:
                assert all(seen[form] is None for form in ("tensor", "tuple", "dict", "objects", "everywhere"))
                continue
            expected = 2.0 * ids.double().reshape(-1, 1)
            assert torch.equal(seen["everywhere"], expected)
            if size == 21:
                assert seen["singly"] == pytest.approx(metrics)
                assert torch.equal(seen["singly everywhere"], expected)
            if rank:
                assert all(seen[form] is None for form in ("tensor", "tuple", "dict", "objects"))
                continue
            assert torch.equal(seen["tensor"], expected)
            assert torch.equal(seen["tuple"][0], expected)
            assert torch.equal(seen["tuple"][1], ids)
            assert torch.equal(seen["dict"]["ids"], ids)
            assert seen["objects"] == [f"sample {number}" for number in range(size)]


def predict_to(folder: Path, num_samples: int, shuffle: bool = False) -> Any:
    """Stream the predictions into `folder`."""
    loop = Loop()
    loader = loop.loader(Numbers(num_samples), global_batch_size=8, shuffle=shuffle)
    return loop.predict(loop.prepare(Doubling()), loader, to=folder)


def test_predict_streams_to_a_folder_batch_by_batch(tmp_path: Path) -> None:
    """Every rank gets the path, the folder has one file per global batch, and reading it gives the order back."""
    results = launch(3, predict_to, tmp_path / "out", 21)
    assert list(results) == [tmp_path / "out"] * 3
    parts = list(read_predictions(tmp_path / "out"))
    assert [len(part) for part in parts] == [8, 8, 5]
    assert torch.equal(torch.cat(parts), 2.0 * torch.arange(21, dtype=torch.float64).reshape(-1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_predict_says_on_every_rank_why_rank_0_could_not_write(tmp_path: Path, shuffle: bool) -> None:
    """A folder that is there, and an order that cannot be streamed: one error with the reason, nothing half written."""
    if not shuffle:
        (tmp_path / "out").mkdir()
    with pytest.raises(RankError) as caught:
        launch(2, predict_to, tmp_path / "out", 21, shuffle)
    assert isinstance(caught.value.__cause__, LoopError)
    assert ("not in the order of the dataset" if shuffle else "exists already") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ([] if shuffle else ["out"])


def give_freed_memory_back() -> None:
    """What is freed leaves the process at once where it is over 64 KB, so that its size tells what it holds."""
    m_mmap_threshold = -3  # of <malloc.h>
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 65_536) == 1


def measure_memory(folder: Path) -> list[int]:
    """Bytes by which this rank's memory grew while it predicted 120 MB: streamed, then kept."""
    give_freed_memory_back()
    loop = Loop()
    process = psutil.Process()
    grown = []

    def used_bytes() -> int:
        """Memory of this process but for pages of files: how many of torch's are mapped depends on the page cache."""
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    def forward(_model: nn.Module, batch: Any) -> torch.Tensor:
        largest[0] = max(largest[0], used_bytes())
        return batch[0].float().expand(len(batch[0]), 125_000).clone()  # type: ignore[no-any-return]

    for to in (folder, None):
        largest, before = [0], used_bytes()
        outputs = loop.predict(nn.Identity(), loop.loader(Numbers(240), global_batch_size=4), to=to, forward=forward)
        grown.append(max(largest[0], used_bytes()) - before)
        del outputs
    return grown


def test_predict_to_a_folder_holds_one_batch_in_memory(tmp_path: Path) -> None:
    """2 MB batches of 120 MB: the rank that writes them grows by a few batches; by all of them where it keeps them."""
    (streamed, kept), (other, _) = launch(2, measure_memory, tmp_path / "out")
    assert kept > 110e6
    assert max(streamed, other) < 40e6
    assert sum(len(part) for part in read_predictions(tmp_path / "out")) == 240


def metrics_of_torchmetrics(num_samples: int, group: Any = None) -> dict[str, Any]:
    """A metric with sums, one with lists, one with means, one in a wrapper, and one that says nothing of its states."""
    from torchmetrics import ClasswiseWrapper, MeanMetric, Metric, MetricCollection, SpearmanCorrCoef
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    class Order(Metric):  # type: ignore[misc,unused-ignore]
        """Depends on the order of samples."""

        def __init__(self) -> None:
            super().__init__()
            self.value: torch.Tensor
            self.add_state("value", torch.zeros((), dtype=torch.float64))

        def update(self, _output: torch.Tensor, target: torch.Tensor) -> None:
            for number in target.tolist():
                self.value = (self.value * 3 + number) % 1009

        def compute(self) -> torch.Tensor:
            return self.value

    loop = Loop(group=group)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (num_samples,), generator=generator)
    loader = loop.loader(torch.utils.data.TensorDataset(logits, targets), global_batch_size=8)
    own = MulticlassConfusionMatrix(5)
    wrapped = ClasswiseWrapper(MulticlassAccuracy(5, average=None))
    classes = loop.evaluate(nn.Identity(), loader, {"matrix": own, "order": Order(), "classes": wrapped})
    spearman = {"spearman": SpearmanCorrCoef()}
    values = loop.evaluate(nn.Identity(), loader, spearman, forward=lambda model, batch: tuple(batch[0].T[:2]))
    means = {"mean": MeanMetric()}
    values |= loop.evaluate(nn.Identity(), loader, means, forward=lambda model, batch: (batch[0],))
    values |= values_near_probabilities(loop, loader)
    both = MetricCollection({"a": MulticlassAccuracy(5), "b": MulticlassConfusionMatrix(5)}, prefix="my_")
    collected = loop.evaluate(nn.Identity(), loader, {"both": both})["both"]
    assert torch.equal(collected["my_b"], classes["matrix"])
    itself: Any = both
    assert loop.evaluate(nn.Identity(), loader, itself)["my_a"] == collected["my_a"]
    values["collected"] = collected["my_a"]
    matrix = torch.zeros(5, 5, dtype=torch.long).index_put_(
        (targets, logits.argmax(1)), torch.ones(num_samples, dtype=torch.long), accumulate=True
    )
    assert torch.equal(classes["matrix"], matrix)
    assert not own.update_called
    assert values["mean"] == pytest.approx(logits.mean().item(), rel=1e-4)
    return {**values, **classes["classes"], "order": classes["order"]}


def values_near_probabilities(loop: Loop, loader: Any) -> dict[str, Any]:
    """Metrics that look at a batch as a whole: whether it lies in [0, 1], and which range it has."""
    from torchmetrics.classification import BinaryAccuracy, MulticlassAUROC
    from torchmetrics.image import StructuralSimilarityIndexMeasure

    near = {"near": MulticlassAUROC(5)}
    found = loop.evaluate(nn.Identity(), loader, near, forward=lambda m, batch: (batch[0] * 0.25 + 0.5, batch[1]))
    low = {"low": BinaryAccuracy()}
    found |= loop.evaluate(nn.Identity(), loader, low, forward=lambda m, batch: (batch[0][:, 0].abs(), batch[1] % 2))
    images = {"images": StructuralSimilarityIndexMeasure(gaussian_kernel=False, kernel_size=3)}
    return found | loop.evaluate(
        nn.Identity(),
        loader,
        images,
        forward=lambda m, batch: (y := batch[0][:, None, :, None] * batch[0][:, None, None], y.round()),
    )


def metrics_alone_and_together() -> list[tuple[Any, Any]]:
    """The same for one rank and for all of them; in one launch, since importing torchmetrics takes long."""
    os.environ.update(TORCHMETRICS_ALONE)
    runpy.run_path(str(CHILDREN / "sitecustomize.py"))
    return [(metrics_of_torchmetrics(n, FakeGroup()), metrics_of_torchmetrics(n)) for n in (21, 201)]


@pytest.mark.timeout(200)
def test_torchmetrics_objects_give_the_same_at_any_world_size() -> None:
    """Whatever their states are, also where a rank has no sample in the last batch; the user's stay untouched."""
    # torchmetrics starts a thread when it is imported: ranks could not be forked from a server that has it.
    for results in launch(2, metrics_alone_and_together):
        for expected, values in results:
            assert values == pytest.approx(expected, rel=1e-5)
            assert values["order"] == expected["order"]


def draw(model: nn.Module, batch: Any) -> torch.Tensor:
    """Draw from each generator, as a model with noise and an augmentation do; only on ranks with samples."""
    torch.rand(3)
    random.random()
    np.random.rand(2)
    output: torch.Tensor = model(batch[0])
    return output


def train_with_dropout(evaluates: bool) -> tuple[torch.Tensor, list[float]]:
    """The weights after two epochs with dropout, and what each generator draws in them, on this rank."""
    loop = Loop(seed=2, progress=False)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(Numbers(13), global_batch_size=4, shuffle=True)
    few = loop.loader(Numbers(5), global_batch_size=4)
    drawn = []
    for _ in loop.epochs(2):
        for x, _ in loop.batches(loader):
            loop.backward(model(x).square().mean())
            loop.step(optimizer)
            drawn += [torch.rand(()).item(), random.random(), float(np.random.rand())]
            if evaluates:
                loop.evaluate(model, few, {"value": lambda output, _: output}, forward=lambda m, b: (draw(m, b), b[1]))
                loop.evaluate(model, few, step=lambda m, b: {"value": draw(m, b).mean()})
                loop.predict(model, few, forward=draw)
                loop.update_batch_norm(model, few, forward=draw)
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]), drawn


def train_with_and_without_evaluation() -> list[tuple[torch.Tensor, list[float]]]:
    """Both, on one rank of several."""
    return [train_with_dropout(evaluates) for evaluates in (False, True)]


def test_random_numbers_of_an_evaluation_do_not_change_the_training() -> None:
    """Bit for bit, on each rank, also those with more samples to evaluate; `random` stays the same on all ranks."""
    of_ranks = launch(3, train_with_and_without_evaluation)
    for (weights, drawn), (same, also) in of_ranks:
        assert torch.equal(weights, same)
        assert drawn == also
    numbers = [drawn[1::3] for (_, drawn), _ in of_ranks]
    assert numbers[0] == numbers[1] == numbers[2]
