# SPDX-License-Identifier: Apache-2.0
"""Batches and outputs in tuples, dicts, lists and classes."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from ddpilot.data.nested import (
    check_rows,
    is_plain,
    join_named_rows,
    join_rows,
    map_tensors,
    plain_attributes,
    take_rows,
    to_device,
    to_host,
    without_rows,
)
from ddpilot.errors import LoopError


class Pair(NamedTuple):
    """Two fields."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """A tensor and a name."""

    x: torch.Tensor
    name: str


def rows(*values: float) -> torch.Tensor:
    """A column."""
    return torch.tensor(values).reshape(-1, 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((rows(1), torch.ones(2, 3)), r"\(\*, 1\) of int64 and \(\*, 3\) of float32"),
        (({"a": rows(1)}, rows(2)), r"\{'a': \(\*, 1\) of int64\} and \(\*, 1\) of int64"),
        (({"a": rows(1)}, {"a": rows(1), "b": rows(2)}), r"\{'a': \(\*, 1\) of int64\} and \{'a': .*, 'b': "),
        (((rows(1),), (rows(1), rows(2))), r"\(\(\*, 1\) of int64\) and \(\(\*, 1\) of int64, \(\*, 1\)"),
    ],
)
def test_rows_that_cannot_be_joined_are_named(parts: Any, said: str) -> None:
    """With whose they are, what they are, and how the first differs."""
    found = rf"^predicting: what rank 0 has cannot .* rank 2 has: {said}"
    with pytest.raises(LoopError, match=found):
        join_named_rows([parts[0], parts[0], parts[1]], ["rank 0", "rank 1", "rank 2"], "predicting")


def test_map_tensors_keeps_structure_and_other_objects() -> None:
    """Named tuples, ordered dicts, lists and frozen dataclasses keep their class; strings and numbers stay."""
    data = [Pair(rows(1), rows(2)), OrderedDict(a=rows(3), b="text"), Sample(rows(4), "four"), 5, None]
    changed = map_tensors(data, lambda tensor: tensor * 10)
    assert changed[0].right.item() == 20.0
    assert (type(changed[1]), changed[1]["a"].item(), changed[1]["b"]) == (OrderedDict, 30.0, "text")
    assert (changed[2].x.item(), changed[2].name) == (40.0, "four")
    assert changed[3:] == [5, None]


def test_to_host_takes_no_more_than_the_rows() -> None:
    """A view of a large tensor would be pickled with all of it."""
    assert to_host(torch.zeros(1000)[:2]).untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([rows(1, 2), rows(3)], rows(1, 2, 3)),
        ([["a", "b"], [], ["c"]], ["a", "b", "c"]),
        ([(rows(1), ["a"]), (rows(2), ["b"])], (rows(1, 2), ["a", "b"])),
        ([{"y": rows(1)}, {"y": rows(2, 3)}], {"y": rows(1, 2, 3)}),
    ],
)
def test_join_rows_and_take_rows_go_through_every_structure(parts: list[Any], joined: Any) -> None:
    """What is joined equals what is expected, and so does every row taken of it."""
    found = join_rows(parts)
    assert repr(found) == repr(joined)
    assert repr(take_rows(found, [0])) == repr(take_rows(joined, [0]))


def test_join_rows_keeps_named_tuples() -> None:
    """And so does taking rows of them."""
    joined = join_rows([Pair(rows(1), rows(2)), Pair(rows(3), rows(4))])
    assert joined.left.tolist() == [[1.0], [3.0]]
    assert take_rows(joined, [1, 0]).right.tolist() == [[4.0], [2.0]]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.tensor(1.0), "a tensor of shape \\(\\) for 2 samples"),
        ({"y": (rows(1, 2), rows(1, 2, 3))}, "a tensor of shape \\(3, 1\\) for 2 samples"),
        (["a"], "a list of 1 objects for 2 samples"),
        (7, "a int, which has no rows"),
    ],
)
def test_check_rows_refuses_what_cannot_be_joined(output: Any, found: str) -> None:
    """The error says what came and for how many samples."""
    with pytest.raises(LoopError, match=found):
        check_rows(output, 2, "predicting")


@pytest.mark.parametrize("part", [3, torch.tensor(1.0)])
def test_what_has_no_rows_on_any_rank_is_said_to_have_none(part: Any) -> None:
    """Not that ranks differ, since they do not; and what to call instead."""
    with pytest.raises(LoopError, match=r"^gathering: .+ from each, which has no rows .+loop.reduce\(\)"):
        join_named_rows([part, part], ["rank 0", "rank 1"], "gathering")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.5, "text", b"bytes", Path("file")),
        *([1, [2.0, "three"]], (1,), {1, 2}, {"a": {"b": torch.ones(2)}}, deque([1])),
        *(numpy.float64(1), numpy.ones(2), torch.ones(2), torch.float16, HTTPStatus.OK),
    ],
    ids=repr,
)
def test_is_plain_takes_numbers_texts_tensors_and_containers_of_them(value: Any) -> None:
    """They refer to nothing else, so setting them on the notebook's object is right."""
    assert is_plain(value)


@pytest.mark.parametrize(
    "value",
    [object(), [object()], {"key": len}, torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1)), len],
    ids=lambda value: type(value).__name__,
)
def test_is_plain_leaves_what_belongs_to_something(value: Any) -> None:
    """A copy of a module or a parameter would take the place of the one that the notebook's model has."""
    assert not is_plain(value)


def test_is_plain_leaves_tensors_with_a_graph_and_arrays_of_objects() -> None:
    """The one cannot travel with its graph, of the other nobody knows what it holds."""
    assert not is_plain(torch.ones(1, requires_grad=True) * 2)
    assert not is_plain(numpy.array([object()]))


def test_plain_attributes_are_those_of_the_object_itself() -> None:
    """Not its class's, and not what is no plain value."""

    class Owner:
        of_the_class = 1

        def __init__(self) -> None:
            self.losses, self.layer, self._count = [0.5], torch.nn.Linear(1, 1), 3

    assert plain_attributes(Owner()) == {"losses": [0.5], "_count": 3}


class Batch(NamedTuple):
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
    sample = {"x": torch.zeros(3, 2), "y": 1, "pair": Batch(np.float32(1), "name"), "names": ("a", "b")}
    batch = empty(default_collate, sample)
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3, 2), torch.float32)
    assert (batch["y"].shape, batch["y"].dtype) == ((0,), torch.int64)
    assert type(batch["pair"]) is Batch
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
    batch = empty(lambda samples: OrderedDict(x=np.stack(samples), n=torch.tensor(3), o=Batch), np.zeros(2))
    assert type(batch) is OrderedDict
    assert (batch["x"].shape, batch["n"].item(), batch["o"]) == ((0, 2), 3, Batch)


@pytest.mark.parametrize("one", [[torch.zeros(1)], (torch.zeros(1),)])
def test_without_rows_empties_a_plain_list_of_samples(one: Any) -> None:
    """A collate function that returns the list of samples is common."""
    assert without_rows(one, one * 2) == type(one)()


class Moved(NamedTuple):
    """A batch."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Item:
    """A batch."""

    x: torch.Tensor
    name: str


class Encoding:
    """Like a tokenizer's encoding: `to` accepts only the device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> Encoding:
        self.device = torch.device(device)
        return self


def test_to_device_moves_tensors_in_any_structure() -> None:
    """Containers keep their class, and other objects stay."""
    x = torch.zeros(2)
    batch = {"pair": Moved(x, [x, "a"]), "item": Item(x, "b"), "own": Encoding(), "map": OrderedDict(x=(x, None, 3))}
    moved = to_device(batch, "meta")
    pair, item, own, mapping = moved["pair"], moved["item"], moved["own"], moved["map"]
    tensors = [pair.x, pair.y[0], item.x, mapping["x"][0]]
    assert [tensor.device.type for tensor in (*tensors, own)] == ["meta"] * 5
    assert (type(pair), type(item), type(mapping)) == (Moved, Item, OrderedDict)
    assert (pair.y[1], item.name, mapping["x"][1:]) == ("a", "b", (None, 3))
    assert batch["pair"].x.device.type == batch["item"].x.device.type == "cpu"  # type: ignore[attr-defined]


def test_to_device_leaves_a_tensor_where_it_is() -> None:
    """A tensor already on the device is not copied."""
    x = torch.zeros(2)
    assert to_device((x,), torch.device("cpu"))[0] is x
