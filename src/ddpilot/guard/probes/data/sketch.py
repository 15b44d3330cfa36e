# SPDX-License-Identifier: Apache-2.0
"""Sketch of the samples that a rank reads: a few, chosen by index alone, so that all ranks can be compared."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from ddpilot.guard.probes.data.samplers import length_of
from ddpilot.guard.probes.tensors import print_rows

NUM_CHOSEN = 64
_MAX_PARTS = 4
_STEP = 0x9E3779B1


class Sketch:
    """Fingerprints of the content of up to 64 samples of `dataset`, of `num_samples`, as far as this rank reads them.

    For a `Subset`, samples of the underlying dataset.
    """

    def __init__(self, dataset: Any, num_samples: int) -> None:
        # Subsets that ranks create themselves have their own indices; the underlying dataset's are common to all ranks.
        self._parts: list[Any] = []
        while type(dataset) is Subset and len(self._parts) < _MAX_PARTS:
            self._parts.append(dataset.indices)
            dataset = dataset.dataset
            num_samples = length_of(dataset) or 0
        self._chosen = {number * _STEP % num_samples for number in range(NUM_CHOSEN)} if num_samples else set()
        self._contents: dict[int, int] = {}
        self._has_repeats = False

    def add(self, indices: Any, batch: Any) -> None:
        """Add the samples `indices`, read as the rows of `batch`."""
        if not isinstance(indices, list | tuple) or not indices or type(indices[0]) is not int:
            return
        for part in self._parts:
            indices = [part[number] for number in indices]
        if type(indices[0]) is not int:
            indices = [int(number) for number in indices]
        found = self._chosen.intersection(indices)
        if not found:
            return
        rows = {indices.index(number): number for number in found}
        for row, content in print_rows(batch, len(indices), list(rows)).items():
            self._has_repeats |= rows[row] in self._contents
            self._contents[rows[row]] = content

    def pairs(self) -> list[tuple[int, int]]:
        """Return index and content of each sample that was read; empty if a sample was read twice."""
        return [] if self._has_repeats else list(self._contents.items())
