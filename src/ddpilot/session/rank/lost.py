# SPDX-License-Identifier: Apache-2.0
"""Find objects bound to the old process group (FSDP, ZeRO, DeviceMesh) that user code must create again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

_HOLDERS = (
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
)


def find_lost(namespace: Mapping[str, Any]) -> list[str]:
    """Return the kinds of objects in this process that are lost with its groups, and the variables that hold one."""
    found = ["groups of `new_group`"] if len(c10d._world.pg_map) > 1 else []
    kinds = {name: getattr(sys.modules[module], name, None) for module, name in _HOLDERS if module in sys.modules}
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    if not kinds:
        return found
    seen = {name for each in gc.get_objects() for name, kind in kinds.items() if kind in type(each).__mro__}
    return found + [name + _in_variables(kinds[name], namespace) for name in sorted(seen)]


def _in_variables(kind: Any, namespace: Mapping[str, Any]) -> str:
    names = [name for name, value in namespace.items() if name[0] != "_" and kind in type(value).__mro__]
    return f" ({', '.join(f'`{name}`' for name in names)})" if names else ""
