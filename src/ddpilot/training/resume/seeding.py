# SPDX-License-Identifier: Apache-2.0
"""Random state at the start of an epoch: a function of seed, epoch and rank, so checkpoints there need not save it."""

from __future__ import annotations

import torch

from ddpilot.data.sample_seeds import mix_seed
from ddpilot.group.init_group import seed_all


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed torch with (seed, epoch, rank), and `random` and numpy with (seed, epoch) only.

    Dropout must differ between ranks, or one mask applies to several samples of a batch. Decisions in Python (which
    branch, which size) must be the same on all ranks, or their collectives do not match.
    """
    seed_all(mix_seed(seed, epoch))
    torch.manual_seed(mix_seed(seed, epoch, rank))


def seed_middle(seed: int, epoch: int, rank: int, batch: int) -> None:
    """Seed torch to resume at `batch` with a different world_size, where saved states of ranks do not apply."""
    torch.manual_seed(mix_seed(seed, epoch, rank, batch))
