# SPDX-License-Identifier: Apache-2.0
"""When something is looked at: often in the beginning, then rarely."""

from __future__ import annotations


def is_due(number: int, first: int = 8, every: int = 1024) -> bool:
    """Whether the `number`-th (from 1) is looked at: the `first` ones, powers of two, and each `every`-th."""
    return number <= first or number & (number - 1) == 0 or number % every == 0
