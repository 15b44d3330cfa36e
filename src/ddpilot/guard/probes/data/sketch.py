# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank reads: a few, chosen by their numbers alone, so that those of all ranks can be compared."""

from __future__ import annotations

from typing import Any

from ddpilot.guard.probes.data.prints import print_rows

NUM_CHOSEN = 64
_STEP = 0x9E3779B1


class Sketch:
    """Fingerprints of the content of 64 samples of a dataset of `num_samples`, as far as this rank reads them."""

    def __init__(self, num_samples: int) -> None:
        self._chosen = {number * _STEP % num_samples for number in range(NUM_CHOSEN)} if num_samples else set()
        self._contents: dict[int, int] = {}
        self._has_repeats = False

    def add(self, indices: Any, batch: Any) -> None:
        """The samples `indices` were read as the rows of `batch`."""
        if not isinstance(indices, list | tuple) or not indices or type(indices[0]) is not int:
            return
        found = self._chosen.intersection(indices)
        if not found:
            return
        rows = {indices.index(number): number for number in found}
        for row, content in print_rows(batch, len(indices), list(rows)).items():
            self._has_repeats |= rows[row] in self._contents
            self._contents[rows[row]] = content

    def pairs(self) -> list[tuple[int, int]]:
        """Sample number and content of each that was read; none where one came twice."""
        return [] if self._has_repeats else list(self._contents.items())
