# SPDX-License-Identifier: Apache-2.0
"""Index batches from tensors directly, which is faster than reading and stacking samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset, default_collate

Rows = Callable[[NDArray[np.int64]], list[torch.Tensor]]


def find_rows(dataset: Any, collate: Callable[[list[Any]], Any]) -> Rows | None:
    """Return a function from sample indices to the batch that `collate` would make, bit for bit; None if unknown."""
    if collate is not default_collate:
        return None
    if type(dataset) is Subset and (rows := find_rows(dataset.dataset, collate)) is not None:
        inner, indices = rows, dataset.indices
        return lambda numbers: inner(np.array([indices[number] for number in numbers.tolist()], dtype=np.int64))
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None

    def take(numbers: NDArray[np.int64]) -> list[torch.Tensor]:
        index = torch.from_numpy(numbers.copy())  # torch warns about read-only arrays
        return [tensor.index_select(0, index) for tensor in dataset.tensors]

    return take


def _is_plain(tensor: torch.Tensor) -> bool:
    on_host = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return on_host and not tensor.is_quantized and not tensor.requires_grad
