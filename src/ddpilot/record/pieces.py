# SPDX-License-Identifier: Apache-2.0
"""Read parts of a file that other processes write, and may truncate or damage meanwhile.

The file is not mapped: access to a mapped page beyond the end of a truncated file ends the process with SIGBUS.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

DAMAGES = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)
"""Exceptions that decoding damaged bytes can raise."""


class Pieces:
    """The current bytes of an open file; a read returns fewer at the end of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` bytes from offset `at`."""
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), num_bytes, at)
        self._file.seek(at)
        return self._file.read(num_bytes)
