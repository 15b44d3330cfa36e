# SPDX-License-Identifier: Apache-2.0
"""Empty batches, moves to a device (`meta` stands for an accelerator), and sample digests."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from ddpilot.data.batches import digest_sample, to_device, without_rows


class Pair(NamedTuple):
    """A sample or a batch."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Boxes:
    """A frozen, user-defined batch."""

    tensor: torch.Tensor
    scale: float


def collate_time_first(samples: list[torch.Tensor]) -> torch.Tensor:
    """Shape (time, samples)."""
    return torch.stack(samples, dim=1)


def collate_detection(samples: list[Any]) -> Any:
    """Like detection references: a tuple of images and one of target dicts."""
    return tuple(zip(*samples, strict=True))


def empty(collate: Any, sample: Any) -> Any:
    """The batch without samples that `collate` would make."""
    return without_rows(collate([sample]), collate([sample, sample]))


def test_without_rows_keeps_structure_shapes_and_dtypes() -> None:
    """Tensors lose their rows, and lists of unstacked values their entries."""
    sample = {"x": torch.zeros(3, 2), "y": 1, "pair": Pair(np.float32(1), "name"), "names": ("a", "b")}
    batch = empty(default_collate, sample)
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3, 2), torch.float32)
    assert (batch["y"].shape, batch["y"].dtype) == ((0,), torch.int64)
    assert type(batch["pair"]) is Pair
    assert (batch["pair"].x.shape, [*batch["pair"].y]) == ((0,), [])
    assert [[*column] for column in batch["names"]] == [[], []]


def test_without_rows_finds_the_dimension_of_the_samples() -> None:
    """It is the dimension that grows with the number of samples."""
    assert empty(collate_time_first, torch.zeros(7)).shape == (7, 0)
    assert empty(collate_detection, (torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)})) == ((), ())
    assert empty(torch.cat, torch.zeros(5, 2)).shape == (0, 2)


def test_without_rows_keeps_values_that_are_not_rows() -> None:
    """Numbers, scalars and other objects stay, and classes are kept."""
    batch = empty(lambda samples: Boxes(torch.stack(samples), 0.5), torch.zeros(4))
    assert (batch.tensor.shape, batch.scale) == ((0, 4), 0.5)
    batch = empty(lambda samples: OrderedDict(x=np.stack(samples), n=torch.tensor(3), o=Pair), np.zeros(2))
    assert type(batch) is OrderedDict
    assert (batch["x"].shape, batch["n"].item(), batch["o"]) == ((0, 2), 3, Pair)


@pytest.mark.parametrize("one", [[torch.zeros(1)], (torch.zeros(1),)])
def test_without_rows_empties_a_plain_list_of_samples(one: Any) -> None:
    """A collate function that returns the list of samples is common."""
    assert without_rows(one, one * 2) == type(one)()


@dataclass(frozen=True)
class Item:
    """A frozen batch."""

    x: torch.Tensor
    name: str


class Encoding:
    """Like a tokenizer's encoding, whose `to` accepts only the device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> Encoding:
        self.device = torch.device(device)
        return self


def test_to_device_moves_tensors_in_any_structure() -> None:
    """Containers keep their class, and other objects stay."""
    x = torch.zeros(2)
    batch = {"pair": Pair(x, [x, "a"]), "item": Item(x, "b"), "own": Encoding(), "map": OrderedDict(x=(x, None, 3))}
    moved = to_device(batch, "meta")
    pair, item, own, mapping = moved["pair"], moved["item"], moved["own"], moved["map"]
    tensors = [pair.x, pair.y[0], item.x, mapping["x"][0]]
    assert [tensor.device.type for tensor in (*tensors, own)] == ["meta"] * 5
    assert (type(pair), type(item), type(mapping)) == (Pair, Item, OrderedDict)
    assert (pair.y[1], item.name, mapping["x"][1:]) == ("a", "b", (None, 3))
    assert batch["pair"].x.device.type == batch["item"].x.device.type == "cpu"  # type: ignore[attr-defined]


def test_to_device_leaves_a_tensor_where_it_is() -> None:
    """A tensor already on the device is not copied."""
    x = torch.zeros(2)
    assert to_device((x,), torch.device("cpu"))[0] is x


@dataclass
class Labelled:
    """A user-defined sample."""

    image: Any
    label: int


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (3, 4, "3"),
        ("a text", "another", "'a text'"),
        (np.float32(0.5), np.float32(0.25), "0.5"),
        (torch.tensor(2.0), torch.tensor(3.0), "2.0"),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2), "[0, 1, 2, ...]"),
        ((torch.ones(5000), 1), (torch.ones(5000), 2), "[1, 1, 1, ...], 1"),
        ({"x": np.zeros((2, 2)), "name": b"n"}, {"y": np.zeros((2, 2)), "name": b"n"}, "'x', [0, 0, 0, ...], 'name'"),
        (Labelled(torch.zeros(2), 0), Labelled(torch.zeros(2), 1), "[0, 0], 0"),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), "[1, 1]"),
        (torch.ones(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64), "(1+0j)"),
        (torch.tensor([True]), torch.tensor([False]), "True"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float8_e4m3fn), "[1, 1]"),
        (object(), [], "a object"),
        (torch.ones(0), torch.ones(0, 2), "[]"),
        (torch.eye(2).to_sparse(), None, "a Tensor"),
    ],
)
def test_digest_sample_is_equal_for_equal_samples_only(one: Any, other: Any, text: str) -> None:
    """It depends on the content, not on the address in memory."""
    again = one if type(one) is object else copy.deepcopy(one)
    assert digest_sample(one) == digest_sample(again)
    assert digest_sample(one).number != digest_sample(other).number
    assert digest_sample(one).text == text


def test_digest_sample_shortens_its_text() -> None:
    """The number still depends on the end of a long sample."""
    assert len(digest_sample("x" * 500).text) == 60
    assert digest_sample(["x"] * 40 + ["y"]).number != digest_sample(["x"] * 41).number
