# SPDX-License-Identifier: Apache-2.0
"""`CollectiveCounter`: number of collectives that this rank has begun, read from its flight ring."""

from __future__ import annotations

import os
from pathlib import Path

from ddpilot.record.flight_ring.layout import NUM_BEGUN
from ddpilot.record.hook import RING_DIR_VARIABLE, ring_path

_WORD_BYTES = 8


class CollectiveCounter:
    """Counts operations begun since `begin`. All counts are None if collectives are not recorded."""

    def __init__(self) -> None:
        folder = os.environ.get(RING_DIR_VARIABLE)
        path = ring_path(folder, int(os.environ["RANK"])) if folder else Path(os.devnull)
        self._fd = os.open(path, os.O_RDONLY) if folder and path.exists() else None
        self._before = 0

    def begin(self) -> None:
        """Start counting."""
        self._before = self._total()

    @property
    def before(self) -> int | None:
        """Collectives and point-to-point operations begun before `begin`; None if not recorded."""
        return None if self._fd is None else self._before

    def count(self) -> int | None:
        """Return the collectives and point-to-point operations begun since `begin`; None if not recorded."""
        return None if self._fd is None else self._total() - self._before

    def _total(self) -> int:
        if self._fd is None:
            return 0
        return int.from_bytes(os.pread(self._fd, _WORD_BYTES, NUM_BEGUN * _WORD_BYTES), "little")
