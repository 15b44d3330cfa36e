# SPDX-License-Identifier: Apache-2.0
"""Process groups as all ranks name them alike."""

from __future__ import annotations

import zlib
from typing import Any

import torch.distributed as dist

_MAX_LISTED = 256


def describe_group(group: Any) -> str:
    """The ranks of `group` in words that are the same on each of them."""
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(dist.get_world_size())):
        return "world"
    listed = ",".join(map(str, ranks))
    return listed if len(ranks) <= _MAX_LISTED else f"{len(ranks)} ranks {zlib.crc32(listed.encode()):08x}"


def sequence_number(group: Any) -> int:
    """How many collectives `group` has started; -1 where its backend does not count, or the group is gone."""
    if group is None:
        return -1
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def has_several_ranks() -> bool:
    """Whether this process is in a default process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
