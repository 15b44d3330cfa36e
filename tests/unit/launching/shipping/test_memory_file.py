# SPDX-License-Identifier: Apache-2.0
"""Memory files and their private mappings."""

from __future__ import annotations

import gc
import os
import re
import sys

import pytest

from ddpilot.launching.shipping.memory_file import MemoryWriter, map_private


def sealed(*pieces: bytes, name: str = "test") -> tuple[int, list[int]]:
    """A finished file that holds `pieces`, and where each lies."""
    writer = MemoryWriter(name)
    offsets = [writer.write(piece).offset for piece in pieces]
    return writer.seal(), offsets


def test_memory_writer_aligns_every_piece_to_64_bytes() -> None:
    """torch reads tensors at aligned addresses; what was written is there."""
    fd, offsets = sealed(b"abc", b"", b"x" * 100, b"end")
    mapped = map_private(fd)
    os.close(fd)
    assert offsets == [0, 64, 64, 192]
    assert bytes(mapped[:3]) == b"abc"
    assert bytes(mapped[64:164]) == b"x" * 100
    assert bytes(mapped[192:]) == b"end"


def test_map_private_keeps_each_reader_apart() -> None:
    """What one mapping writes is seen by no other: ranks must not train each other's tensors."""
    fd, _ = sealed(b"weights")
    first, second = map_private(fd), map_private(fd)
    first[:7] = b"changed"
    assert bytes(second[:7]) == b"weights"
    assert bytes(map_private(fd)[:7]) == b"weights"
    os.close(fd)


def test_map_private_gives_no_bytes_for_an_empty_file() -> None:
    """An empty file cannot be mapped by the system, and is a value like any other."""
    fd, _ = sealed()
    assert len(map_private(fd)) == 0
    os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
def test_memory_writer_seals_the_file() -> None:
    """Nobody can change what was sent."""
    fd, _ = sealed(b"abc")
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    os.close(fd)


def test_memory_writer_leaves_no_descriptor_when_given_up() -> None:
    """A failed pickle closes the file; closing after `seal` does not close what was handed over."""
    before = os.listdir("/proc/self/fd")
    MemoryWriter("test").close()
    assert os.listdir("/proc/self/fd") == before
    writer = MemoryWriter("test")
    fd = writer.seal()
    writer.close()
    os.fstat(fd)
    os.close(fd)


def test_map_private_is_unmapped_when_the_last_view_is_gone() -> None:
    """A slice keeps the mapping alive; without any, the memory is given back."""
    fd, _ = sealed(b"x" * 100_000, name="of_this_test_alone")
    name = os.readlink(f"/proc/self/fd/{fd}").partition(" ")[0]
    view = map_private(fd)[100:200]
    os.close(fd)
    gc.collect()
    assert bytes(view) == b"x" * 100
    assert _is_mapped(name)
    del view
    gc.collect()
    assert not _is_mapped(name)


def _is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return re.search(re.escape(name), maps.read()) is not None
