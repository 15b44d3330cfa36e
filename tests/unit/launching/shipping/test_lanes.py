# SPDX-License-Identifier: Apache-2.0
"""Large buffers in several files."""

from __future__ import annotations

import os

import pytest

from ddpilot.launching.local import wire
from ddpilot.launching.shipping.lanes import LaneWriter, Span
from ddpilot.launching.shipping.memory import map_private


@pytest.mark.parametrize("max_lanes", [1, 2, 4])
def test_lane_writer_gives_every_buffer_back(max_lanes: int) -> None:
    """Small and large buffers lie where their spans say, in at most `max_lanes` files."""
    writer = LaneWriter("test", max_lanes=max_lanes)
    buffers = [bytes([number]) * size for number, size in enumerate([0, 5, 3 << 20, 7, 2 << 20, 1 << 20, 9, 4 << 20])]
    spans = [writer.write(buffer) for buffer in buffers]
    fds = writer.seal()
    mapped = [map_private(fd) for fd in fds]
    wire.close_all(fds)
    assert len(fds) == min(max_lanes, 4)
    for span, buffer in zip(spans, buffers, strict=True):
        assert bytes(mapped[span.lane][span.offset : span.offset + span.length]) == buffer


def test_lane_writer_write_first_keeps_to_the_first_file_whatever_the_size() -> None:
    """The index of a parcel is found from the first file's end, however many tensors there are."""
    writer = LaneWriter("test", max_lanes=4)
    writer.write(b"a" * (2 << 20))
    assert writer.write(b"b" * (2 << 20)).lane == 1
    assert writer.write_first(b"c" * (2 << 20)) == Span(0, 2 << 20, 2 << 20)
    wire.close_all(writer.seal())


def test_lane_writer_leaves_no_descriptor_when_given_up() -> None:
    """All files of a parcel whose pickling failed are closed."""
    before = os.listdir("/proc/self/fd")
    writer = LaneWriter("test", max_lanes=4)
    for _ in range(4):
        writer.write(b"x" * (2 << 20))
    writer.close()
    assert os.listdir("/proc/self/fd") == before
