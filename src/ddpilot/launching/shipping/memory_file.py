# SPDX-License-Identifier: Apache-2.0
"""Memory files: written once, sealed, and mapped privately (copy on write) by every reader.

A shared mapping would let ranks, and the parent, train the same tensors in place.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
from typing import NamedTuple

_ALIGNMENT_BYTES = 64  # torch's own CPU allocator aligns to 64
_MAP_FIXED = 0x10  # on Linux and macOS


class Span(NamedTuple):
    """Location of data in a memory file: offset and length in bytes."""

    offset: int
    length: int


class MemoryWriter:
    """Writes a new memory file. Call `seal` to finish and get its descriptor, or `close` to discard it."""

    def __init__(self, name: str) -> None:
        self.fd = _open_memory_file(name)
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> Span:
        """Append `data` at the next offset that is a multiple of 64, and return where it is."""
        view = memoryview(data).cast("B")
        span = Span(-(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, len(view))
        done = 0
        while done < len(view):  # one write moves at most 2 GiB - 4 KiB on Linux
            done += os.pwrite(self.fd, view[done : done + (1 << 30)], span.offset + done)
        self.size_bytes = span.offset + span.length
        return span

    def seal(self) -> int:
        """Make the file immutable (on Linux) and return its descriptor, which the caller must close."""
        fd, self.fd = self.fd, -1
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return fd

    def close(self) -> None:
        """Discard the file. Does nothing after `seal`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open_memory_file(name: str) -> int:
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=name) as file:  # type: ignore[unreachable,unused-ignore]
        return os.dup(file.fileno())


def map_private(fd: int) -> memoryview:
    """Map a whole memory file as writable bytes private to this process; `fd` may be closed afterwards.

    Pages are read when they are touched and copied when they are written. `mmap.mmap` of `fd` would keep a descriptor
    open as long as the mapping exists: a notebook with the results of 300 launches would run out of them. It maps
    memory of that size instead, over which the file is mapped. It also unmaps it, without running Python code: a
    finalizer in Python would swallow an interrupt.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return memoryview(bytearray())
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, size_bytes, protection, flags, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping a memory file of {size_bytes} bytes: {os.strerror(number)}")
    return memoryview(region)
