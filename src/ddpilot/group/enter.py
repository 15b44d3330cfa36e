# SPDX-License-Identifier: Apache-2.0
"""`init_group`: from an environment to a process group whose device is chosen."""

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
    """Enter the process group of this job and return it; this rank's device is chosen and current. Collective.

    `backend`: "nccl", "gloo", "cpu:gloo,cuda:nccl" ...; default: DDPILOT_BACKEND, else what suits the device.
    `timeout_s`: seconds that a collective, and the wait for the other ranks, may last; default: torch's, 10 minutes for
    NCCL and 30 for gloo.
    `seed`: seeds `random`, torch and (where imported) numpy with the same number on every rank; default: leaves them.
    `distributed`: True insists on a launcher's environment, False stays alone whatever is set, None detects.

    Alone, the group has one rank and needs no address; gloo still listens on a free port of the loopback interface.
    Called twice, it returns an equal `Group`. A group that other code made is adopted: `Group.adopted` is True. The
    group is left at exit. Raises TopologyError for a contradictory environment, GroupError for a device or backend
    that is not there, RendezvousError where the ranks do not meet, with the ranks that never came in `missing`.
    """
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise GroupError("entering the group", found=f"`timeout_s` is {timeout_s}", fix="Pass seconds above 0 or None.")
    if not torch.distributed.is_available():
        raise GroupError(
            "entering the group",
            found="this build of PyTorch has no torch.distributed",
            fix="Install a build that has it: the official wheels for Linux, macOS and Windows do.",
        )
    # Not importable where torch.distributed is missing.
    from ddpilot.group.joining import join_group

    group = join_group(backend, timeout_s, distributed)
    if seed is not None:
        seed_all(seed)
    return group


def seed_all(seed: int) -> None:
    """Seed `random`, torch and, where it is imported, numpy with `seed`."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
