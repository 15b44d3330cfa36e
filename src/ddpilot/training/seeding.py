# SPDX-License-Identifier: Apache-2.0
"""Random state at the beginning of an epoch: a function of seed, epoch and rank, so that it needs no saving there."""

from __future__ import annotations

import torch

from ddpilot.data.seeding import mix_seed
from ddpilot.group.enter import seed_all


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed torch with (seed, epoch, rank), and `random` and numpy with (seed, epoch) alone.

    Dropout has to differ between ranks, or the same mask meets several samples of a batch. What a program decides in
    Python (which branch, which size) has to be the same on all ranks, or they meet in different collectives.
    """
    seed_all(mix_seed(seed, epoch))
    torch.manual_seed(mix_seed(seed, epoch, rank))


def seed_middle(seed: int, epoch: int, rank: int, batch: int) -> None:
    """Seed torch for going on with `batch`, at another number of ranks: nobody has the state of a new rank."""
    torch.manual_seed(mix_seed(seed, epoch, rank, batch))
