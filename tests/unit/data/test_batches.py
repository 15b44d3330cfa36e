# SPDX-License-Identifier: Apache-2.0
"""What a batch of no samples looks like."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from ddpilot.data.batches import without_rows


class Pair(NamedTuple):
    """A sample or a batch."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Boxes:
    """A batch of a class of the user's, that cannot be changed."""

    tensor: torch.Tensor
    scale: float


def collate_time_first(samples: list[torch.Tensor]) -> torch.Tensor:
    """Shape (time, samples)."""
    return torch.stack(samples, dim=1)


def collate_detection(samples: list[Any]) -> Any:
    """As detection references do it: a tuple of pictures, and one of dicts of targets."""
    return tuple(zip(*samples, strict=True))


def empty(collate: Any, sample: Any) -> Any:
    """The batch of no samples that `collate` would make."""
    return without_rows(collate([sample]), collate([sample, sample]))


def test_without_rows_keeps_structure_shapes_and_dtypes() -> None:
    """Tensors lose their rows, and lists of what is not stacked their entries."""
    sample = {"x": torch.zeros(3, 2), "y": 1, "pair": Pair(np.float32(1), "name"), "names": ("a", "b")}
    batch = empty(default_collate, sample)
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3, 2), torch.float32)
    assert (batch["y"].shape, batch["y"].dtype) == ((0,), torch.int64)
    assert type(batch["pair"]) is Pair
    assert (batch["pair"].x.shape, [*batch["pair"].y]) == ((0,), [])
    assert [[*column] for column in batch["names"]] == [[], []]


def test_without_rows_finds_the_dimension_of_the_samples() -> None:
    """It is the one that grows with their number."""
    assert empty(collate_time_first, torch.zeros(7)).shape == (7, 0)
    assert empty(collate_detection, (torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)})) == ((), ())
    assert empty(torch.cat, torch.zeros(5, 2)).shape == (0, 2)


def test_without_rows_keeps_what_is_no_row() -> None:
    """Numbers, scalars and other objects stay, and classes are kept."""
    batch = empty(lambda samples: Boxes(torch.stack(samples), 0.5), torch.zeros(4))
    assert (batch.tensor.shape, batch.scale) == ((0, 4), 0.5)
    batch = empty(lambda samples: OrderedDict(x=np.stack(samples), n=torch.tensor(3), o=Pair), np.zeros(2))
    assert type(batch) is OrderedDict
    assert (batch["x"].shape, batch["n"].item(), batch["o"]) == ((0, 2), 3, Pair)


@pytest.mark.parametrize("one", [[torch.zeros(1)], (torch.zeros(1),)])
def test_without_rows_empties_a_plain_list_of_samples(one: Any) -> None:
    """A collate function that gives back the samples is one of the commonest."""
    assert without_rows(one, one * 2) == type(one)()
