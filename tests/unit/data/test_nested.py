# SPDX-License-Identifier: Apache-2.0
"""Batches and outputs in tuples, dicts, lists and classes."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from ddpilot.data.nested import (
    check_rows,
    is_plain,
    join_named_rows,
    join_rows,
    map_tensors,
    plain_attributes,
    take_rows,
    to_host,
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
        (((rows(1),), (rows(1), rows(2))), r"\(\(\*, 1\) of int64\) and \(\(\*, 1\) of int64, \(\*, 1\)"),
    ],
)
def test_rows_that_cannot_be_joined_are_named(parts: Any, said: str) -> None:
    """With whose they are, what they are, and how the first differs."""
    found = rf"^\[rank 0\] predicting: what rank 0 has cannot .* rank 2 has: {said}"
    with pytest.raises(LoopError, match=found):
        join_named_rows([parts[0], parts[0], parts[1]], ["rank 0", "rank 1", "rank 2"], "predicting", 0)


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
    with pytest.raises(LoopError, match=r"^\[rank 1\] gathering: .+ from each, which has no rows .+loop.reduce\(\)"):
        join_named_rows([part, part], ["rank 0", "rank 1"], "gathering", 1)


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
