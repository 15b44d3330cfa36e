# SPDX-License-Identifier: Apache-2.0
"""When ranks that have called different collectives are told so."""

from __future__ import annotations

from pathlib import Path

from ddpilot.record.hook import ring_path
from ddpilot.session.desync import Desync
from tests.unit.record.rings import ABOUT, begin, open_ring


def test_a_difference_is_noted_once_and_only_of_this_cell(tmp_path: Path) -> None:
    """Not in the first two seconds, in which most cells are over; and not where no rank is busy."""
    for rank in range(2):
        ring = open_ring(ring_path(tmp_path, rank), publish=False)
        ring.publish({**ABOUT, "rank": rank})
        begin(ring, 10**10, shape=(2 + rank,))
    notes: list[str] = []
    desync = Desync((0, 1), folder=tmp_path, since_s=9.0, note=notes.append)
    for busy, now_s in (((0, 1), 10.9), ((), 11.5)):
        desync.look(busy, now_s)
    assert notes == []
    for now_s in (11.6, 12.7, 13.8):
        desync.look((0, 1), now_s)
    assert notes == [
        (
            "collective 0 of the default group is not the same on all ranks: rank 0 called all_reduce (2 elements) in "
            "train.py, line 88 (loss.backward()), rank 1 called all_reduce (3 elements) in train.py, line 88 "
            "(loss.backward()); press stop, and let all ranks call the same"
        )
    ]
    assert Desync((0, 1), folder=tmp_path, since_s=11.0, note=notes.append).explain() == ""
