# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks read the same stream: an iterable dataset is divided exactly only if they do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch

from ddpilot.data.batches import LocalBatch
from ddpilot.data.glimpses import NOTHING, Glimpse
from ddpilot.errors import DataError
from ddpilot.group.accelerator import wire_device
from ddpilot.group.protocol import GroupLike

_FIX = (
    "Let the dataset yield every sample on every rank, for each takes its part by itself; or let it divide them by "
    "torch.utils.data.get_worker_info(), which then counts the workers of all ranks, and say `divides_itself=True`."
)


def check_stream(members: Sequence[LocalBatch], group: GroupLike, epoch: int) -> None:
    """Raise DataError on all ranks unless they read the same number of samples for this update, and the same ones.

    `members`: the update's batches. Compares their sizes and the first sample of each. Collective.
    """
    seen = [batch.first_seen for batch in members if batch.first_seen is not None]
    count = float(sum(batch.global_count or 0 for batch in members))
    content = float(zlib.crc32(b"".join(one.number.to_bytes(4, "big") for one in seen)))
    limits = torch.tensor([count, -count, content, -content], dtype=torch.float64)
    most, least, largest, smallest = group.all_reduce(limits.to(wire_device(group)), op="max").tolist()
    if (most, largest) != (-least, -smallest):
        _refuse(int(count), seen[0] if seen else NOTHING, group, f"epoch {epoch}")


def _refuse(count: int, seen: Glimpse, group: GroupLike, when: str) -> NoReturn:
    said: list[tuple[int, str]] = group.all_gather_object((count, seen.text))
    each = "; ".join(f"rank {rank} {number} samples, the first {text}" for rank, (number, text) in enumerate(said[:4]))
    more = f"; and {len(said) - 4} more ranks" if len(said) > 4 else ""
    is_same_count = len({number for number, _ in said}) == 1
    about = " (`seed_samples=False` compares sizes alone, where samples are the same but for augmentation.)"
    raise DataError(
        f"reading a stream in {when}",
        found=f"the ranks do not see the same stream; for the next update {each}{more}",
        fix=_FIX + (about if is_same_count else ""),
        rank=group.rank,
    )
