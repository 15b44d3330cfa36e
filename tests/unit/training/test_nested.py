# SPDX-License-Identifier: Apache-2.0
"""Batches and outputs in tuples, dicts, lists and classes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from ddpilot.errors import LoopError
from ddpilot.training.nested import check_rows, join_named_rows, join_rows, map_tensors, take_rows, to_host


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
