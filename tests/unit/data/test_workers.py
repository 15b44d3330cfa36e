# SPDX-License-Identifier: Apache-2.0
"""Batches that are taken from tensors at once are those that torch collates sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from ddpilot.data.workers import find_rows

X = torch.arange(24, dtype=torch.float64).reshape(6, 2, 2)
DATA = TensorDataset(X, torch.arange(6), X.bool().transpose(1, 2))


@pytest.mark.parametrize("numbers", [[0], [5, 1, 1]])
@pytest.mark.parametrize("dataset", [DATA, Subset(DATA, [5, 4, 3, 2, 1, 0]), Subset(DATA, np.arange(6)[::-1].tolist())])
def test_rows_are_what_collate_makes(dataset: Dataset[Any], numbers: list[int]) -> None:
    """Values, dtypes and shapes, repeated samples too; a list, and nothing shared with the dataset."""
    rows = find_rows(dataset, default_collate)
    assert rows is not None
    taken, collated = rows(np.array(numbers)), default_collate([dataset[number] for number in numbers])
    assert type(taken) is type(collated)
    for one, other in zip(taken, collated, strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
        one.zero_()
    assert DATA.tensors[0].sum() == 276


class Own(TensorDataset):
    """May do anything with its samples."""


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (DATA, list),
        (Own(X), default_collate),
        ([1, 2], default_collate),
        (TensorDataset(X.to_sparse()), default_collate),
        (Subset(Own(X), [0]), default_collate),
    ],
)
def test_rows_are_taken_of_nothing_else(dataset: Any, collate: Any) -> None:
    """User-defined datasets and collate functions, and other kinds of tensors, are read sample by sample."""
    assert find_rows(dataset, collate) is None
