# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of batches, selection of samples, and states of generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from ddpilot.guard.probes.data.position import is_due
from ddpilot.guard.probes.data.random_draws import LIBRARIES, device_digest, digest_of
from ddpilot.guard.probes.data.samplers import Sketch, describe_loader, may_repeat
from ddpilot.guard.probes.tensors import fingerprint, fingerprint_rows, num_rows_of, tensors_in

KEY: Any = {"loader": 1, "pass": 1}


@dataclass
class Batch:
    """As some collate functions return them."""

    images: torch.Tensor
    targets: dict[str, list[torch.Tensor]]


def test_tensors_are_found_with_their_names() -> None:
    """In containers and dataclasses, as deep as batches go."""
    batch = Batch(torch.ones(2), {"boxes": [torch.zeros(3), torch.zeros(4)]})
    assert [name for name, _ in tensors_in(batch)] == ["images", "targets.boxes.0", "targets.boxes.1"]
    assert [name for name, _ in tensors_in((5, "x", batch.images))] == ["2"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3),
        torch.arange(12).reshape(4, 3),
        torch.arange(12.0).reshape(4, 3).bfloat16(),
        torch.arange(12.0).reshape(4, 3).half(),
        torch.arange(12).reshape(4, 3) % 2 == 0,
        torch.arange(12).reshape(4, 3).to(torch.uint8),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(4, 3).to(torch.complex64),
    ],
    ids=["float", "int", "bfloat16", "half", "bool", "uint8", "transposed", "complex"],
)
def test_fingerprint_tells_contents_apart(tensor: torch.Tensor) -> None:
    """Equal for a copy, different for a different value, shape or type."""
    found = fingerprint([tensor])
    assert found is not None
    assert found == fingerprint([tensor.clone()])
    other = tensor.clone()
    other[1, 1] = other[1, 0]
    assert fingerprint([other]) != found
    assert fingerprint([tensor.reshape(2, 6)]) != found
    assert found.num_elements == 12


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(0, 3),
        "text",
        None,
    ],
    ids=["elsewhere", "sparse", "conjugate", "empty", "text", "none"],
)
def test_fingerprint_is_none_where_nothing_can_be_read(data: Any) -> None:
    """Nothing is copied from a device, and nothing raised."""
    assert fingerprint((data,)) is None


def test_fingerprint_of_a_large_tensor_looks_at_all_of_its_length() -> None:
    """Evenly spread, also where it is not contiguous."""
    large = torch.zeros(100_000)
    found = fingerprint(large)
    large[97 * 500 :] = 1
    assert fingerprint(large) != found
    wide = torch.zeros(1000, 1000)[:, ::2]
    assert fingerprint(wide) is not None


def test_rows_are_told_apart_and_only_where_all_tensors_have_them() -> None:
    """A label counts too."""
    x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 0])
    rows = fingerprint_rows((x, y), 4, [0, 1, 2])
    assert rows[0] == rows[2] != rows[1]
    assert fingerprint_rows((x, y[:3]), 4, [0]) == {}
    assert num_rows_of((x, y)) == 4
    assert num_rows_of((x, y[:3])) is None


def test_sketches_of_two_ranks_have_samples_in_common_only_where_they_overlap() -> None:
    """For any order and size of batches."""
    data = torch.randn(500, 3)

    def sketch(numbers: list[int], size: int) -> dict[int, int]:
        found = Sketch(data, len(data))
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            found.add(part, data[part])
        return dict(found.pairs())

    whole, shuffled = sketch(list(range(500)), 7), sketch(torch.randperm(500).tolist(), 16)
    assert whole == shuffled
    assert len(whole) == 64
    even, odd = sketch(list(range(0, 500, 2)), 10), sketch(list(range(1, 500, 2)), 10)
    assert not even.keys() & odd.keys()
    assert {**even, **odd} == whole


def test_sketches_of_parts_that_ranks_cut_out_have_in_common_what_overlaps() -> None:
    """Each numbers its own from 0; the numbers of the whole dataset are compared."""
    data = torch.randn(600, 3)
    found = []
    for start in (0, 200):
        inner: Subset[torch.Tensor] = Subset(data, range(599, -1, -1))  # type: ignore[arg-type]
        mine = Subset(inner, range(start, start + 400))
        sketch = Sketch(mine, len(mine))
        for first in range(0, 400, 20):
            numbers = list(range(first, first + 20))
            sketch.add(numbers, torch.stack([mine[number] for number in numbers]))
        found.append(set(sketch.pairs()))
    assert all(200 <= 599 - number < 400 for number, _ in found[0] & found[1])
    assert len(found[0] & found[1]) >= 10


def test_a_sketch_of_draws_with_replacement_holds_nothing() -> None:
    """Each rank draws its own order then; and indices may be anything."""
    found = Sketch(range(10), 10)
    found.add([1, 2], torch.zeros(2, 1))
    found.add([2, 3], torch.zeros(2, 1))
    assert found.pairs() == []
    others = Sketch(range(10), 10)
    for indices in (["a"], [[1]], [], 5, None):
        others.add(indices, torch.zeros(1, 1))
    assert others.pairs() == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_digests_follow_states_and_change_none(library: str) -> None:
    """Reading the state draws nothing."""
    draws: dict[str, Any] = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}
    first = digest_of(library)
    assert first == digest_of(library) != 0
    draws[library]()
    assert digest_of(library) != first
    assert device_digest(torch.device("cpu")) == ("torch", digest_of("torch"))


def test_often_at_first_then_rarely() -> None:
    """The schedule of comparisons."""
    assert [number for number in range(1, 3100) if is_due(number)] == [
        *(1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072)
    ]


class Wrapped(Sampler[list[int]]):
    """A batch sampler around a batch sampler, as Accelerate's."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 4, 3

    def __len__(self) -> int:
        raise TypeError("unknown")


class Stream(IterableDataset[int]):
    """torch would warn if the stream is longer than its length."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def __len__(self) -> int:
        raise AssertionError("nobody may ask")


def test_loaders_are_described_by_who_divides_them() -> None:
    """torch's sampler, a nested one, none, and a stream."""
    data = TensorDataset(torch.zeros(10, 1))
    sampler: Any = DistributedSampler(data, num_replicas=3, rank=1, seed=5)
    facts = describe_loader(DataLoader(data, 2, sampler=sampler), KEY, {})
    assert (facts["length"], facts["samples"], facts["size"]) == (2, 10, 2)
    known = {"kind": "DistributedSampler", "length": 4, "epoch": 0, "seed": 5, "shuffle": True, "drop_last": False}
    assert facts["sampler"] == {**known, "has_set_epoch": True, "replicas": 3, "rank": 1}
    inner = BatchSampler(RandomSampler(data), 2, drop_last=False)
    wrapped: Any = describe_loader(DataLoader(data, batch_sampler=Wrapped(inner)), KEY, {})
    assert (wrapped["sampler"]["replicas"], wrapped["sampler"]["rank"], wrapped["length"]) == (4, 3, None)
    plain: Any = describe_loader(DataLoader(data, 2), KEY, {})["sampler"]
    assert plain["kind"] == "SequentialSampler"
    assert "replicas" not in plain
    stream = describe_loader(DataLoader(Stream(), 2), KEY, {})
    assert (stream["length"], stream["samples"], stream["sampler"]) == (None, None, None)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_parts_of_a_dataset_are_told_whatever_their_numbers_are_in(kind: Callable[[list[int]], Any]) -> None:
    """Of a Subset and of a sampler: the same checksum for the same numbers, and how many there are to take from."""
    data = TensorDataset(torch.zeros(10, 1))
    numbers = kind([7, 1, 4])
    loaders = [DataLoader(Subset(data, numbers), 2), DataLoader(data, 2, sampler=SubsetRandomSampler(numbers))]
    described = [describe_loader(loader, KEY, {}) for loader in loaders]
    assert [facts["share"] for facts in described] == [[3, 10], [3, 10]]
    known = describe_loader(DataLoader(Subset(data, [7, 1, 4]), 2), KEY, {})["part"]
    assert [facts["part"] for facts in described] == [known, known]


@pytest.mark.parametrize("numbers", [(), np.zeros((2, 2), dtype=int), {1, 2}])
def test_parts_without_an_order_of_numbers_are_not_told(numbers: Any) -> None:
    """Nor is a whole dataset."""
    data = TensorDataset(torch.zeros(10, 1))
    for loader in (DataLoader(Subset(data, numbers), 2), DataLoader(data, 2)):
        facts = describe_loader(loader, KEY, {})
        assert (facts["part"], facts["share"]) == (None, None)


def test_orders_that_each_rank_draws_for_itself_are_known() -> None:
    """With replacement, or a part of the dataset."""
    data = TensorDataset(torch.zeros(10, 1))
    assert may_repeat(DataLoader(data, sampler=RandomSampler(data, replacement=True)))
    assert may_repeat(DataLoader(data, sampler=RandomSampler(data, num_samples=5)))
    assert not may_repeat(DataLoader(data, shuffle=True))
