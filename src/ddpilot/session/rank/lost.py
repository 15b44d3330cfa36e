# SPDX-License-Identifier: Apache-2.0
"""What a new process group cannot be given to: it holds the old one, and only the user's code can make it anew."""

from __future__ import annotations

import gc
import sys

from torch.distributed import distributed_c10d as c10d

_HOLDERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
    "torch.distributed.fsdp.fully_shard": "FSDPModule",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed.device_mesh": "DeviceMesh",
}


def find_lost() -> list[str]:
    """Kinds of objects of this process that go with its groups, in words; empty where there are none."""
    num_others = max(0, len(c10d._world.pg_map) - 1)
    found = [f"{num_others} group{'s' * (num_others > 1)} of `new_group`"] if num_others else []
    kinds = {
        name: getattr(sys.modules[module], name, None) for module, name in _HOLDERS.items() if module in sys.modules
    }
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    if not kinds:
        return found
    seen = {name for each in gc.get_objects() for name, kind in kinds.items() if kind in type(each).__mro__}
    return found + sorted(seen)
