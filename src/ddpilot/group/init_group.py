# SPDX-License-Identifier: Apache-2.0
"""`init_group`: enter the process group that the environment describes, on a chosen device."""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed

from ddpilot.errors import GroupError

if TYPE_CHECKING:
    from ddpilot.group.process_group import Group


def init_group(
    backend: str | None = None,
    timeout_s: float | None = None,
    seed: int | None = None,
    *,
    distributed: bool | None = None,
) -> Group:
    """Enter the process group of this job and return it; this rank's device is chosen and made current. Collective.

    - `backend`: "nccl", "gloo", "cpu:gloo,cuda:nccl" ...; default: DDPILOT_BACKEND, else chosen for the device.
    - `timeout_s`: timeout in seconds of each collective and of the wait for the other ranks; default: torch's, 10
      minutes for NCCL and 30 for gloo.
    - `seed`: seeds `random`, torch and numpy (if it is imported) with this number on every rank; default: no seeding.
    - `distributed`: True requires a launcher's environment, False ignores it and uses one rank, None detects it.

    A single process gets a group of one rank and needs no address; gloo still listens on a free port of the loopback
    interface. A second call returns an equal `Group`. A group that other code created is adopted, and `Group.adopted`
    is True. The group is left at exit.

    Raises TopologyError if the environment is contradictory, GroupError if the device or backend is not available, and
    RendezvousError, with the ranks in `missing`, if ranks do not join in time.
    """
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise GroupError("entering the group", found=f"`timeout_s` is {timeout_s}", fix="Pass seconds above 0 or None.")
    if not torch.distributed.is_available():
        raise GroupError(
            "entering the group",
            found="this build of PyTorch has no torch.distributed",
            fix="Install a build that has it: the official wheels for Linux, macOS and Windows do.",
        )
    # Cannot be imported if torch.distributed is missing.
    from ddpilot.group.creation import join_group

    group = join_group(backend, timeout_s, distributed)
    if seed is not None:
        seed_all(seed)
    return group


def seed_all(seed: int) -> None:
    """Seed `random`, torch and, if it is imported, numpy with `seed`."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
