# SPDX-License-Identifier: Apache-2.0
"""Count the collectives that a rank has begun, from its flight ring."""

from __future__ import annotations

from pathlib import Path

from ddpilot.record.flight_ring.layout import NUM_BEGUN
from ddpilot.record.hook import ring_path

_WORD_BYTES = 8


def count_begun(folder: Path, rank: int) -> int | None:
    """Return the number of collectives and point-to-point operations that the rank has begun; None if not recorded."""
    try:
        with ring_path(folder, rank).open("rb") as ring:
            ring.seek(NUM_BEGUN * _WORD_BYTES)
            return int.from_bytes(ring.read(_WORD_BYTES), "little")
    except OSError:
        return None
