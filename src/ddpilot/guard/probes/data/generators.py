# SPDX-License-Identifier: Apache-2.0
"""States of random number generators, read without changing them, and made small enough to note."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch

LIBRARIES = ("python", "numpy", "torch")


def digest_of(library: str) -> int:
    """Of the global generator of `library`; 0 where it was never used in this process. Never 0 else."""
    if library == "torch":
        return zlib.crc32(torch.get_rng_state().numpy().tobytes()) + 1
    if library == "python":
        return hash(random.getstate()[1]) & 0xFFFFFFFF | 1 << 32
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or "numpy.random" not in sys.modules:
        return 0
    _, key, position, _, _ = numpy.random.get_state()
    return zlib.crc32(key.tobytes(), position) + 1


def device_digest(device: torch.device) -> tuple[str, int]:
    """Whose generator dropout on `device` draws from, and its digest. CUDA's state is kept by the host."""
    if device.type != "cuda":
        return "torch", digest_of("torch")
    state = torch.cuda.default_generators[device.index or 0].get_state()
    return f"torch.cuda on {device}", zlib.crc32(state.numpy().tobytes()) + 1
