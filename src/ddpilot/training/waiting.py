# SPDX-License-Identifier: Apache-2.0
"""Measures the time that a rank waits for data."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


class WaitClock:
    """Adds up the time that iterators take to return their next item."""

    def __init__(self) -> None:
        self.total_s = 0.0
        """Total seconds so far."""

    def over(self, items: Generator[T, None, None]) -> Iterator[T]:
        """Yield from `items` and measure the time of each; closing this closes them."""
        clock = time.perf_counter
        try:
            while True:
                begin_s = clock()
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.total_s += clock() - begin_s
                yield item
        finally:
            items.close()
