# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of torch's loader, and says what to do where they cannot be."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ddpilot.errors import DataError


def start_reading(loader: DataLoader[Any], rank: int) -> Iterator[Any]:
    """`iter(loader)`. `DataError` where the dataset would have to be pickled for its workers and cannot be."""
    try:
        return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method = _start_method(loader)
        if not loader.num_workers or method == "fork":
            raise
        raise DataError(
            f"starting {loader.num_workers} workers by `{method}`, which pickles the dataset and its functions",
            found=f"{type(error).__name__}: {error}",
            fix="Define them at the top of a module, without lambdas, or use `multiprocessing_context='fork'` or "
            "`num_workers=0`.",
            rank=rank,
        ) from error


def _start_method(loader: DataLoader[Any]) -> str:
    context = loader.multiprocessing_context
    return multiprocessing.get_start_method() if context is None else str(context.get_start_method())
