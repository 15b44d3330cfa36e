# SPDX-License-Identifier: Apache-2.0
"""Decide when to observe: often at first, then rarely."""

from __future__ import annotations


def is_due(number: int, first: int = 8, every: int = 1024) -> bool:
    """True for the `first` numbers (from 1), powers of two, and every `every`-th number."""
    return number <= first or number & (number - 1) == 0 or number % every == 0
