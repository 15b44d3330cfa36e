# SPDX-License-Identifier: Apache-2.0
"""Random state: equal on all ranks between fits, different during a fit.

Between fits all ranks draw the same numbers, so that a split or an order made in a cell is the same everywhere. During
a fit rank 0 continues as one process would, and the other ranks draw their own dropout and augmentations.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ddpilot.group.device import rng_state, runs_behind, set_rng_state
from ddpilot.group.init_group import seed_all
from ddpilot.group.process_group import Group

_State = tuple[Any, tuple[Any, ...], bytes, bytes]
"""State of Python, NumPy, torch on the CPU, and torch on this rank's accelerator (b"" without one)."""


def start_equal(run_id: str) -> None:
    """Seed this rank from `run_id`, which all ranks of a session share and no other session has."""
    seed_all(_derive(run_id.encode()))


@contextlib.contextmanager
def own_random(group: Group) -> Iterator[None]:
    """Context manager: ranks other than 0 draw their own random numbers. Collective.

    On entry, all ranks take rank 0's random state, and ranks other than 0 are then seeded from it and their rank. On
    exit, all ranks take rank 0's state. After an exception, the exit is not collective: all ranks get the same state,
    derived from the one on entry.
    """
    origin: _State = group.broadcast_object(_capture(group.device))
    _restore(origin, group.device)
    if group.rank:
        seed_all(_derive(repr(origin).encode(), b"rank %d" % group.rank))
    try:
        yield
        _restore(group.broadcast_object(_capture(group.device)), group.device)
    except BaseException:
        seed_all(_derive(repr(origin).encode(), b"after"))
        raise


@contextlib.contextmanager
def rank_zero_random(group: Group, loader: Any) -> Iterator[None]:
    """Context manager: all ranks draw from rank 0's random states, the global ones and the loader's own. Collective.

    On exit, the global random states of the other ranks are restored.
    """
    shared = getattr(loader, "rng", None)
    state, shared_state = group.broadcast_object((_capture(), shared.getstate() if shared else None))
    own = _capture()
    if group.rank:
        _restore(state)
        if shared is not None:
            shared.setstate(shared_state)
    try:
        yield
    finally:
        if group.rank:
            _restore(own)


def _capture(device: torch.device | None = None) -> _State:
    """Return the current states as numbers, strings and bytes; pickled tensors and their `repr` differ between runs."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy = (name, np.asarray(keys).tobytes(), *rest)
    gpu = b""
    if device is not None and runs_behind(device):
        gpu = rng_state(device).numpy().tobytes()
    return random.getstate(), numpy, torch.get_rng_state().numpy().tobytes(), gpu


def _restore(state: _State, device: torch.device | None = None) -> None:
    python, (name, keys, *rest), cpu, gpu = state
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    if gpu and device is not None:
        set_rng_state(torch.frombuffer(bytearray(gpu), dtype=torch.uint8), device)


def _derive(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=4).digest(), "little")
