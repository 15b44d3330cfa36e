# SPDX-License-Identifier: Apache-2.0
"""`Logger`, the base class of loggers, and conversions of the values in a row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpilot.errors import LoopError


@dataclass(frozen=True, kw_only=True)
class LogStart:
    """Where a training starts or resumes."""

    update: int
    """Number of updates made before."""
    is_new: bool
    """True for a new run: it does not continue an existing file."""
    is_kept: Callable[[int, Mapping[str, Any]], bool]
    """Called with the index and the contents of each row of an existing file; False for rows to be written again."""


class Logger(ABC):
    """Base class of loggers. Its methods are called on rank 0 only, in the order `check`, `open`, `write`, `close`.

    A logger is pickled and sent to the ranks: open files and import libraries in `open`.
    """

    def check(self) -> None:  # noqa: B027  (most loggers need no more)
        """Raise LoopError if the logger cannot be used here, e.g. because a library is missing."""

    @abstractmethod
    def open(self, start: LogStart) -> None:
        """Open the log, and remove the rows after the position at which the training resumes."""

    @abstractmethod
    def write(self, kind: str, row: Mapping[str, Any], update: int) -> None:
        """Write a row of numbers, strings or lists by name; `update` is the number of updates so far.

        `kind`: "update", "epoch" (also for values that are logged between passes) or "interval".
        """

    def close(self, *, failed: bool = False) -> None:  # noqa: B027
        """Close the log; `failed`: True if training ended with an exception. Idempotent; `open` may follow."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, such as the ID of the run at a service."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Load what `state_dict` returned, before `open`."""


def plain(value: Any) -> Any:
    """Convert a tensor with one element to a number, and other tensors and arrays to lists."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.tolist() if hasattr(value, "tolist") else value


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of `row` that are numbers, as floats."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}


def finite(value: Any) -> Any:
    """Return `value` with non-finite numbers as the strings "nan", "inf" and "-inf", which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def missing_library(did: str, error: ImportError, fix: str) -> LoopError:
    """Return the error for a logger whose library is not installed."""
    return LoopError(did, found=f"{error}", fix=fix, rank=0)
