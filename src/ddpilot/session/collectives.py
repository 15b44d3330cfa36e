# SPDX-License-Identifier: Apache-2.0
"""Whether a rank that is busy has begun collectives, or waits for other ranks, seen from the parent."""

from __future__ import annotations

import time
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.record.hook import ring_path
from ddpilot.record.layout import NUM_BEGUN
from ddpilot.record.now import NUM_NEWEST
from ddpilot.record.reading import read_ring

_WORD_BYTES = 8
_RECORDED_LATE_S = 0.15
_PAUSE_S = 0.01
_GROUP_CODE = ("/torch/distributed/", "/ddpilot/group/")


def count_begun(folder: Path, rank: int) -> int | None:
    """Collectives and point-to-point operations that the rank has begun; None where they are not recorded."""
    try:
        with ring_path(folder, rank).open("rb") as ring:
            ring.seek(NUM_BEGUN * _WORD_BYTES)
            return int.from_bytes(ring.read(_WORD_BYTES), "little")
    except OSError:
        return None


def has_unfinished(folder: Path, rank: int, *, p2p_only: bool = False) -> bool:
    """Whether a collective of the rank is not over, or that is unknown. Ends are recorded up to 50 ms late.

    With `p2p_only` of sends and receives: a collective that all ranks have begun comes to its end by itself.
    """
    limit_s = time.monotonic() + _RECORDED_LATE_S
    while True:
        try:
            newest = read_ring(ring_path(folder, rank), newest=NUM_NEWEST).collectives
        except (RecordError, OSError):
            return True
        is_unfinished = any(each.state == "begun" and (each.is_p2p or not p2p_only) for each in newest)
        if not is_unfinished or time.monotonic() > limit_s:
            return is_unfinished
        time.sleep(_PAUSE_S)


def is_in_group_code(stack: str) -> bool:
    """Whether the main thread with that stack is in code that may wait for other ranks; True if nothing is known."""
    return not stack or any(part in stack for part in _GROUP_CODE)
