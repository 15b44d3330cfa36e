# SPDX-License-Identifier: Apache-2.0
"""`FileWatch`: the parts of ranks' files (flight rings, journals of guard) that have changed since the last look."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ddpilot.record.flight_ring import layout
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.session.nodes.messages import FileBlocks

_CHUNK_BYTES = 1 << 16
_BLOCK_BYTES = 4096
_CLOCK_WORDS = slice(layout.HEARTBEAT_NS * 8, layout.HEARTBEAT_NS * 8 + 8)
_ACTIVE_S = 2.0
"""Seconds after the last change of its header for which a file is compared at each look: ends are recorded late."""

_IDLE_S = 1.0


@dataclass
class _Known:
    """What the parent has of a file."""

    inode: int
    chunks: list[bytes] = field(default_factory=list)
    header: bytes = b""
    changed_s: float = 0.0
    compared_s: float = 0.0


class FileWatch:
    """Passes changed blocks of the files of ranks in `folder` to `send`, so that the parent has a copy of each file."""

    def __init__(self, folder: Path, send: Callable[[FileBlocks], None]) -> None:
        self._folder = folder
        self._send = send
        self._known: dict[str, _Known] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Send what has changed in the files of `ranks`."""
        for rank in ranks:
            for path in (ring_path(self._folder, rank), journal_path(self._folder, rank)):
                with contextlib.suppress(OSError, ValueError):  # not created yet, or being created
                    self._look_at(path)

    def _look_at(self, path: Path) -> None:
        now = time.monotonic()
        with open(path, "rb", buffering=0) as file:
            inode = os.fstat(file.fileno()).st_ino
            known = self._known.get(path.name)
            is_new = known is None or known.inode != inode
            if known is None or is_new:
                known = self._known[path.name] = _Known(inode)
            header = bytearray(os.pread(file.fileno(), layout.ABOUT_AT, 0))
            header[_CLOCK_WORDS] = bytes(8)
            if header != known.header:
                known.header, known.changed_s = bytes(header), now
            elif now > known.changed_s + _ACTIVE_S and now < known.compared_s + _IDLE_S:
                return
            known.compared_s = now
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as current:
                blocks, size = _take_changes(current, known.chunks), len(current)
        if blocks or is_new:
            self._send(FileBlocks(path.name, size, blocks, is_new))


def _take_changes(current: mmap.mmap, chunks: list[bytes]) -> dict[int, bytes]:
    """Return the blocks of `current` that differ from `chunks`, by offset, and update those."""
    blocks: dict[int, bytes] = {}
    for number, at in enumerate(range(0, len(current), _CHUNK_BYTES)):
        chunk = current[at : at + _CHUNK_BYTES]
        if number == len(chunks):
            chunks.append(bytes(len(chunk)))  # the copy begins with zeros too
        if chunk != chunks[number]:
            before = chunks[number]
            for start in range(0, len(chunk), _BLOCK_BYTES):
                block = chunk[start : start + _BLOCK_BYTES]
                if block != before[start : start + _BLOCK_BYTES]:
                    blocks[at + start] = block
            chunks[number] = chunk
    return blocks
