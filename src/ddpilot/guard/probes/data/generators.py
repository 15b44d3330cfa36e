# SPDX-License-Identifier: Apache-2.0
"""States of random number generators, read without changing them, and made small enough to note."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch

from ddpilot.record.host_copies import can_copy_from

_BLOCK_WORDS = 624
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


def words_between(before: torch.Tensor, after: torch.Tensor) -> int:
    """How many words torch's generator on the CPU gave between two of its states, at least."""
    (first, block), (last, other) = _take_apart(before), _take_apart(after)
    return max(0, last - first) if block == other else max(0, _BLOCK_WORDS - first) + last


def _take_apart(state: torch.Tensor) -> tuple[int, bytes]:
    """Where in its block of words a Mersenne Twister is, and the block. The state is torch's, since its first days."""
    data = state.numpy().tobytes()
    return int.from_bytes(data[16:24], sys.byteorder), data[24 : 24 + 8 * _BLOCK_WORDS]


def device_digest(device: torch.device) -> tuple[str, int]:
    """Whose generator dropout on `device` draws from, and its digest. An accelerator's state is kept by the host.

    Not to be called while a device graph is captured: its generator is not to be read then.
    """
    module: Any = torch.get_device_module(device) if can_copy_from(device.type) else None
    if not hasattr(module, "get_rng_state"):
        return "torch", digest_of("torch")
    return f"torch.{device.type} on {device}", zlib.crc32(module.get_rng_state(device).numpy().tobytes()) + 1
