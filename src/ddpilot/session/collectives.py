# SPDX-License-Identifier: Apache-2.0
"""Read from the parent whether a busy rank has begun collectives, or is waiting for other ranks."""

from __future__ import annotations

import time
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.record.flight_ring.current import NUM_NEWEST
from ddpilot.record.flight_ring.layout import NUM_BEGUN
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import ring_path

_WORD_BYTES = 8
_RECORDED_LATE_S = 0.15
_PAUSE_S = 0.01
_GROUP_CODE = ("/torch/distributed/", "/ddpilot/group/")


def count_begun(folder: Path, rank: int) -> int | None:
    """Return the number of collectives and point-to-point operations that the rank has begun; None if not recorded."""
    try:
        with ring_path(folder, rank).open("rb") as ring:
            ring.seek(NUM_BEGUN * _WORD_BYTES)
            return int.from_bytes(ring.read(_WORD_BYTES), "little")
    except OSError:
        return None


def has_unfinished(folder: Path, rank: int, *, p2p_only: bool = False) -> bool:
    """True if the rank has an unfinished collective, or if that is unknown. Ends are recorded up to 50 ms late.

    With `p2p_only`, only sends and receives count: a collective that all ranks have begun finishes on its own.
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
    """True if `stack`, of a main thread, is in code that may wait for other ranks, or if it is empty (unknown)."""
    return not stack or any(part in stack for part in _GROUP_CODE)
