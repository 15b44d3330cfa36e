# SPDX-License-Identifier: Apache-2.0
"""`LocalBatch`, a rank's piece of a global batch, and empty batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpilot.data.glimpses import Glimpse


@dataclasses.dataclass(eq=False, slots=True)  # creating a frozen one would take four times as long
class LocalBatch:
    """This rank's piece of one global batch."""

    data: Any
    """The piece, collated. If `count` is 0: the same structure, dtypes and shapes, with zero rows."""

    index: int
    """Number of the global batch in its epoch, from 0."""

    count: int
    """Number of samples on this rank; 0 if a last batch has fewer samples than there are ranks."""

    global_count: int | None
    """Number of samples on all ranks. None if the loader `is_joint`: the ranks have to add up their counts."""

    sample_ids: NDArray[np.int64]
    """Indices of the samples in the dataset, shape (`count`,), in the order of `data`; -1 if an iterable dataset
    divides itself, as its samples are not numbered."""

    stream_state: Any = None
    """For an iterable dataset with `state_dict`: its state after this batch, equal on every rank. None otherwise, and
    after a last batch that is smaller."""

    first_seen: Glimpse | None = None
    """For a stream that every rank reads as a whole: a glimpse of the first sample of the global batch, to compare
    between ranks. None otherwise, and without `seed_samples`, when samples may differ."""


def without_rows(one: Any, two: Any) -> Any:
    """Make a batch without samples, from a batch of one sample (`one`) and a batch of that sample twice (`two`).

    What is twice as long in `two` contains rows and loses them: dimensions of tensors and arrays, lists, tuples. What
    is equal in both (a number, a shape) stays, as do objects that are neither containers nor dataclasses.
    """
    if isinstance(one, torch.Tensor | np.ndarray):
        if one.ndim != two.ndim:
            return one[:0]
        return one[tuple(slice(None if a == b else 0) for a, b in zip(one.shape, two.shape, strict=True))]
    if isinstance(one, Mapping):
        return _with_items(one, {key: without_rows(value, two[key]) for key, value in one.items()})
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*(without_rows(a, b) for a, b in zip(one, two, strict=True)))
    if isinstance(one, list | tuple):
        parts = [without_rows(a, b) for a, b in zip(one, two, strict=True)] if len(one) == len(two) else []
        return type(one)(parts)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        return _with_attributes(one, {name: without_rows(getattr(one, name), getattr(two, name)) for name in names})
    return one


def _with_items(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `data` (an OrderedDict, a tokenizer's encoding) with these items."""
    if type(data) is dict:
        return items
    result: Any = copy.copy(data)
    for key, value in items.items():
        result[key] = value
    return result


def _with_attributes(data: Any, values: dict[str, Any]) -> Any:
    """Return a copy of the dataclass `data`, which may be frozen, without calling `__init__`."""
    result = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result
