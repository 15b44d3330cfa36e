# SPDX-License-Identifier: Apache-2.0
"""Random state per sample, so that augmentation is the same in any worker of any rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch.utils.data import get_worker_info

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Hash `parts` to a 64-bit number; different parts, or a different order of them, give an unrelated number."""
    state = 0
    for part in parts:
        # The finalizer of splitmix64: every input bit changes about half of the output bits.
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_random(seed: int) -> None:
    """Seed Python's `random`, NumPy's global state (with the lower half) and torch's CPU generator with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # several times faster than seeding with an array of both halves
    torch.default_generator.manual_seed(seed)


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU random state on exit, so that the model's draws are not affected."""
    before_python = random.getstate()
    before_numpy = np.random.get_state(legacy=False)
    before_torch = torch.default_generator.get_state()
    try:
        yield
    finally:  # also for Ctrl-C, after which the loop may continue
        random.setstate(before_python)
        np.random.set_state(before_numpy)
        torch.default_generator.set_state(before_torch)


def random_apart() -> AbstractContextManager[None]:
    """Return a context manager for reading samples with seeds, which preserves the random state of the rank.

    It does nothing in a worker, whose random state nothing else uses.
    """
    return random_kept() if get_worker_info() is None else nullcontext()
