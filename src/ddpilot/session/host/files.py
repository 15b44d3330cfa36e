# SPDX-License-Identifier: Apache-2.0
"""`FileWatch`: the parts of ranks' files (flight rings, journals of guard) that have changed since the last look."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ddpilot.record.flight_ring import layout
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.session.nodes.messages import FileBlocks

_PIECE_BYTES = 1 << 16
_BLOCK_BYTES = 4096
_CLOCK_WORDS = slice(layout.HEARTBEAT_NS * 8, layout.HEARTBEAT_NS * 8 + 8)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
"""Seconds between two comparisons of a file whose header does not change, first and longest: ends of collectives are
recorded late. Comparing is the larger part of what a host costs while its ranks are idle."""


class WatchedFile:
    """A file of a rank, mapped, and what the parent has of it. Raises OSError or ValueError if there is none yet.

    Ranks write a file under a different name before they rename it, so its size does not change. While it is mapped,
    the number of its inode is not used again.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            self.inode = os.fstat(file.fileno()).st_ino
            self._current = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._current)
        ends = (*range(_BLOCK_BYTES, self.size, _PIECE_BYTES), self.size)
        self._copy = [bytearray(end - start) for start, end in itertools.pairwise((0, *ends))]
        """The parent's copy, in pieces, of which the first is the one that changes with each heartbeat."""
        self._header = b""
        self._is_settled = False
        """True if the file was compared at the end of a cell and its header has not changed since."""
        self._compared_s = 0.0
        self._wait_s = _FIRST_WAIT_S

    def is_due(self, now: float, *, is_end: bool) -> bool:
        """Return True if the file has to be compared now. `is_end`: at the end of a cell, or of the rank."""
        header = bytearray(self._current[: layout.ABOUT_AT])
        header[_CLOCK_WORDS] = bytes(8)
        if header != self._header:
            self._header, self._is_settled, self._wait_s = bytes(header), is_end, _FIRST_WAIT_S
        elif is_end and not self._is_settled:
            self._is_settled = True
        elif now >= self._compared_s + self._wait_s:
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        else:
            return False
        self._compared_s = now
        return True

    def take_changes(self) -> dict[int, bytes]:
        """Return the blocks that differ from the parent's copy, by offset, and update the copy."""
        blocks: dict[int, bytes] = {}
        at = 0
        with memoryview(self._current) as current:
            for piece in self._copy:
                if piece != current[at : at + len(piece)]:
                    data = bytes(current[at : at + len(piece)])  # the rank may be writing
                    for start in range(0, len(data), _BLOCK_BYTES):
                        block = data[start : start + _BLOCK_BYTES]
                        if block != piece[start : start + _BLOCK_BYTES]:
                            blocks[at + start] = block
                    piece[:] = data
                at += len(piece)
        return blocks

    def close(self) -> None:
        """Unmap the file."""
        self._current.close()


class FileWatch:
    """Passes changed blocks of the files of ranks in `folder` to `send`, so that the parent has a copy of each file."""

    def __init__(self, folder: Path, send: Callable[[FileBlocks], None]) -> None:
        self._folder = folder
        self._send = send
        self._files: dict[Path, WatchedFile] = {}

    def look(self, ranks: Iterable[int], *, is_end: bool = False) -> None:
        """Send what has changed in the files of `ranks`. `is_end`: the end of a cell or a rank is reported next."""
        for rank in ranks:
            for path in (ring_path(self._folder, rank), journal_path(self._folder, rank)):
                with contextlib.suppress(OSError, ValueError):  # not created yet, or being created
                    self._look_at(path, is_end)

    def _look_at(self, path: Path, is_end: bool) -> None:
        file = self._files.get(path)
        is_new = file is None or file.inode != os.stat(path).st_ino
        if file is None or is_new:
            previous, file = file, WatchedFile(path)
            self._files[path] = file
            if previous is not None:
                previous.close()
        if file.is_due(time.monotonic(), is_end=is_end):
            blocks = file.take_changes()
            if blocks or is_new:
                self._send(FileBlocks(path.name, file.size, blocks, is_new))
