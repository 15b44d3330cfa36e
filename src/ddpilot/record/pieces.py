# SPDX-License-Identifier: Apache-2.0
"""Read pieces of a file that others write, and may cut off or damage meanwhile.

Not mapped: who touches a mapped page that the file has lost is ended by SIGBUS.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

DAMAGES = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)
"""What comes of decoding bytes that nobody wrote."""


class Pieces:
    """The bytes of an open file as they are at each moment; a piece is shorter where the file ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Of the file now."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, at: int, num_bytes: int) -> bytes:
        """The `num_bytes` from `at` on."""
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), num_bytes, at)
        self._file.seek(at)
        return self._file.read(num_bytes)
