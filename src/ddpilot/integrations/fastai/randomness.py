# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the same on all ranks where data is chosen, different where noise is made.

Between fits all ranks draw the same numbers, so that a split or an order made in a cell is one split and one order.
During a fit rank 0 goes on as one process would, and the others draw their own dropout and augmentations.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ddpilot.group.enter import seed_all
from ddpilot.group.process_group import Group


def start_equal(run_id: str) -> None:
    """Seed this rank from what all ranks of the session, and no other session, know."""
    seed_all(_derive(run_id.encode()))


@contextlib.contextmanager
def own_noise(group: Group) -> Iterator[None]:
    """Take rank 0's state; inside, ranks above 0 draw their own numbers; after it all are equal again. Collective.

    Leaving is no collective, so a fit that failed leaves the ranks equal too.
    """
    origin = group.broadcast_object(pickle.dumps(_capture()))  # its bytes: equal objects need not pickle equally
    _put_back(pickle.loads(origin))
    if group.rank:
        seed_all(_derive(origin, b"rank %d" % group.rank))
    try:
        yield
    finally:
        seed_all(_derive(origin, b"after"))


@contextlib.contextmanager
def rank_zeros(group: Group, loader: Any) -> Iterator[None]:
    """Inside, all ranks draw as rank 0 does, from the global states and from the loader's own. Collective."""
    shared = getattr(loader, "rng", None)
    state, shared_state = group.broadcast_object((_capture(), shared.getstate() if shared else None))
    own = _capture()
    if group.rank:
        _put_back(state)
        if shared is not None:
            shared.setstate(shared_state)
    try:
        yield
    finally:
        if group.rank:
            _put_back(own)


def _capture() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put_back(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _derive(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=4).digest(), "little")
