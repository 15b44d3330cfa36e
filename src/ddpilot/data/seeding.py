# SPDX-License-Identifier: Apache-2.0
"""Random state for one sample: what augments it draws the same in any worker of any rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """One number of 64 bits made of `parts`; any other parts, or another order of them, give an unrelated one."""
    state = 0
    for part in parts:
        # The finaliser of splitmix64: every bit of the input changes about half of those of the output.
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_random(seed: int) -> None:
    """Seed Python's `random`, numpy's global state (with the lower half) and torch's CPU generator with 64 bits."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # several times as fast as an array of both halves
    torch.default_generator.manual_seed(seed)


class RandomState:
    """Python's, numpy's and torch's CPU random state, as it was when this was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state()

    def is_current(self) -> bool:
        """Whether nothing was drawn or seeded since."""
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
        """Make it the state again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)


@contextmanager
def random_kept() -> Iterator[None]:
    """Give Python's, numpy's and torch's CPU random state back afterwards: the model draws from the same ones."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
