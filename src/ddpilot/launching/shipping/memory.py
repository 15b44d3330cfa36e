# SPDX-License-Identifier: Apache-2.0
"""A memory file: bytes written once, sealed, and mapped privately (copy on write) by every reader.

Private, because ranks that mapped the same tensor shared would train it in place together, the parent's model too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import tempfile
import weakref
from typing import Any

_ALIGNMENT_BYTES = 64  # torch's own CPU allocator aligns to 64
_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE = 0x2
_MAP_FAILED = ctypes.c_void_p(-1).value


class MemoryWriter:
    """Writes a new memory file. `close` on failure; `seal` hands the finished file descriptor over."""

    def __init__(self, name: str) -> None:
        self.fd = _open_memory_file(name)
        self.size_bytes = 0

    def reserve(self, length: int) -> int:
        """Set `length` bytes aside at the end; return their offset, a multiple of 64."""
        offset = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.size_bytes = offset + length
        return offset

    def write_at(self, offset: int, view: memoryview) -> None:
        """Fill bytes that were reserved."""
        done = 0
        while done < len(view):  # one write moves at most 2 GiB - 4 KiB on Linux
            done += os.pwrite(self.fd, view[done : done + (1 << 30)], offset + done)

    def seal(self) -> int:
        """Make the file immutable where the system can, and return its descriptor, which the caller now owns."""
        fd, self.fd = self.fd, -1
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return fd

    def close(self) -> None:
        """Give the file up. Does nothing once it was sealed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open_memory_file(name: str) -> int:
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=name) as file:  # type: ignore[unreachable,unused-ignore]
        return os.dup(file.fileno())


def map_private(fd: int) -> memoryview:
    """The whole of a memory file as writable bytes of this process alone; `fd` may be closed afterwards.

    Pages are read when they are touched and copied when they are written. Not `mmap.mmap`, which keeps a descriptor
    open for as long as the mapping lives: a notebook that keeps the results of 300 launches would run out of them.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return memoryview(bytearray())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size_bytes, _PROT_READ_WRITE, _MAP_PRIVATE, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping a memory file of {size_bytes} bytes: {os.strerror(number)}")
    region: Any = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Not at exit: tensors that live in the mapping may still be used then, and the process ends anyway.
    weakref.finalize(region, libc.munmap, address, size_bytes).atexit = False
    return memoryview(region).cast("B")
