# SPDX-License-Identifier: Apache-2.0
"""Random state per sample, so that augmentation is the same in any worker of any rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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


class RandomState:
    """Python's, NumPy's and torch's CPU random state at the time of creation."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state()

    def is_current(self) -> bool:
        """True if the random state has not changed since."""
        numpy: Any = np.random.get_state(legacy=False)
        before: Any = self._numpy
        return (
            torch.equal(self._torch, torch.default_generator.get_state())
            and numpy["state"]["pos"] == before["state"]["pos"]
            and numpy["has_gauss"] == before["has_gauss"]
            and np.array_equal(numpy["state"]["key"], before["state"]["key"])
            and self._python == random.getstate()
        )

    def restore(self) -> None:
        """Restore the state."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU random state on exit, so that the model's draws are not affected."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
