# SPDX-License-Identifier: Apache-2.0
"""Read states of random number generators without changing them, as digests that are small enough to note."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch

from ddpilot.record.accelerator import can_copy_from

_BLOCK_WORDS = 624
LIBRARIES = ("python", "numpy", "torch")


def digest_of(library: str) -> int:
    """Digest of the global generator of `library`; 0 only if it was never used in this process."""
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
    """Lower bound on the number of words that torch's CPU generator produced between two of its states."""
    (first, block), (last, other) = _take_apart(before), _take_apart(after)
    return max(0, last - first) if block == other else max(0, _BLOCK_WORDS - first) + last


def _take_apart(state: torch.Tensor) -> tuple[int, bytes]:
    """Return the position of a Mersenne Twister in its block of words, and the block. torch's state has this layout."""
    data = state.numpy().tobytes()
    return int.from_bytes(data[16:24], sys.byteorder), data[24 : 24 + 8 * _BLOCK_WORDS]


def device_digest(device: torch.device) -> tuple[str, int]:
    """Return the name of the generator that dropout on `device` draws from, and its digest. The host keeps its state.

    Must not be called while a device graph is captured, as the generator must not be read then.
    """
    module: Any = torch.get_device_module(device) if can_copy_from(device.type) else None
    if not hasattr(module, "get_rng_state"):
        return "torch", digest_of("torch")
    return f"torch.{device.type} on {device}", zlib.crc32(module.get_rng_state(device).numpy().tobytes()) + 1
