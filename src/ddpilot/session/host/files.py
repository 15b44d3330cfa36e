# SPDX-License-Identifier: Apache-2.0
"""`FileWatch`: the parts of ranks' files (flight rings, journals of guard) that have changed since the last look."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ddpilot.record.hook import journal_path, ring_path
from ddpilot.session.nodes.messages import FileBlocks

_BLOCK_BYTES = 4096


class FileWatch:
    """Passes changed blocks of the files of ranks in `folder` to `send`, so that the parent has a copy of each file."""

    def __init__(self, folder: Path, send: Callable[[FileBlocks], None]) -> None:
        self._folder = folder
        self._send = send
        self._known: dict[str, tuple[int, bytearray]] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Send what has changed in the files of `ranks`."""
        for rank in ranks:
            for path in (ring_path(self._folder, rank), journal_path(self._folder, rank)):
                with contextlib.suppress(OSError, ValueError):  # not created yet, or being created
                    self._look_at(path)

    def _look_at(self, path: Path) -> None:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            inode, content = self._known.get(path.name, (0, bytearray()))
            is_new = inode != status.st_ino
            if is_new:
                content = bytearray()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as current:
                blocks = self._changed(current, content)
        self._known[path.name] = status.st_ino, content
        if blocks or is_new:
            self._send(FileBlocks(path.name, len(content), blocks, is_new))

    def _changed(self, current: mmap.mmap, content: bytearray) -> dict[int, bytes]:
        """Return the blocks of `current` that differ from `content`, and update that."""
        size = len(current)
        blocks: dict[int, bytes] = {}
        if len(content) != size:
            content[size:] = b""
            content.extend(bytes(size - len(content)))
        known = memoryview(content)
        now = memoryview(current)
        try:
            for at in range(0, size, _BLOCK_BYTES):
                end = min(at + _BLOCK_BYTES, size)
                if now[at:end] != known[at:end]:
                    blocks[at] = bytes(now[at:end])
                    known[at:end] = blocks[at]
        finally:
            now.release()
            known.release()
        return blocks
