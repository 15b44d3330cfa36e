# SPDX-License-Identifier: Apache-2.0
"""Random state: equal on all ranks between fits, different during a fit.

Between fits all ranks draw the same numbers, so that a split or an order made in a cell is the same everywhere. During
a fit rank 0 continues as one process would, and the other ranks draw their own dropout and augmentations.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from ddpilot.group.device import capture_rng, restore_rng
from ddpilot.group.init_group import seed_all
from ddpilot.group.process_group import Group


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
    origin: dict[str, Any] = group.broadcast_object(capture_rng(group.device))
    restore_rng(origin, group.device)
    if group.rank:
        seed_all(_derive(_content(origin), b"rank %d" % group.rank))
    try:
        yield
        restore_rng(group.broadcast_object(capture_rng(group.device)), group.device)
    except BaseException:
        seed_all(_derive(_content(origin), b"after"))
        raise


@contextlib.contextmanager
def rank_zero_random(group: Group, loader: Any) -> Iterator[None]:
    """Context manager: all ranks draw from rank 0's random states, the global ones and the loader's own. Collective.

    On exit, the global random states of the other ranks are restored.
    """
    shared = getattr(loader, "rng", None)
    state, shared_state = group.broadcast_object((capture_rng(), shared.getstate() if shared else None))
    own = capture_rng()
    if group.rank:
        restore_rng(state)
        if shared is not None:
            shared.setstate(shared_state)
    try:
        yield
    finally:
        if group.rank:
            restore_rng(own)


def _content(states: dict[str, Any]) -> bytes:
    """Return bytes that are equal on all ranks; pickled tensors and their `repr` differ between runs."""
    parts = [*states["numpy"], *(state for name, state in states.items() if name != "numpy")]
    return repr([part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]).encode()


def _derive(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=4).digest(), "little")
