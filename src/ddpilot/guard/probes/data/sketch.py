# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank reads: a few, chosen by their numbers alone, so that those of all ranks can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpilot.guard.probes.data.prints import print_rows

NUM_KEPT = 64
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class Sketch:
    """Keeps the samples whose scrambled numbers are the smallest, with fingerprints of their content."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, int]] = {}  # by sample: its key, its content
        self._limit = np.uint64(2**64 - 1)
        self.has_repeats = False

    def add(self, indices: Any, batch: Any) -> None:
        """The samples `indices` were read as the rows of `batch`."""
        numbers = _as_numbers(indices)
        if numbers is None:
            return
        keys = numbers * _MIX
        keys = (keys ^ (keys >> _SHIFT)) * _MIX
        rows = np.flatnonzero(keys < self._limit)[:NUM_KEPT]
        if not len(rows):
            return
        contents = print_rows(batch, len(numbers), rows.tolist())
        for row, content in contents.items():
            number = int(numbers[row])
            self.has_repeats |= number in self._kept
            self._kept[number] = (int(keys[row]), content)
        if len(self._kept) > NUM_KEPT:
            smallest = sorted(self._kept.items(), key=lambda item: item[1][0])[:NUM_KEPT]
            self._kept = dict(smallest)
            self._limit = np.uint64(smallest[-1][1][0])

    def pairs(self) -> list[tuple[int, int]]:
        """Sample number and content of each that is kept; none where one came twice."""
        return [] if self.has_repeats else [(number, content) for number, (_, content) in self._kept.items()]


def _as_numbers(indices: Any) -> Any:
    """`indices` as unsigned numbers; None where they are something else."""
    if not isinstance(indices, list | tuple) or not indices or not all(type(one) is int for one in indices):
        return None
    return np.asarray(indices, dtype=np.int64).astype(np.uint64)
