# SPDX-License-Identifier: Apache-2.0
"""Groups have the same name on all ranks, and a new one after a rebuild."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ddpilot.guard.probes.process_groups import GroupGenerations, describe_group, find_world, sequence_number


def test_eras_change_with_the_default_group(tmp_path: Path) -> None:
    """None, one, and the next one are three; asked again, the same is no change."""
    eras, names = GroupGenerations(), []
    for number in range(2):
        store = FileStore(str(tmp_path / str(number)), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert eras.has_changed()
        assert not eras.has_changed()
        names.append(eras.name)
        assert describe_group(dist.group.WORLD) == "world"
        before = sequence_number(dist.group.WORLD)
        dist.barrier()
        assert sequence_number(dist.group.WORLD) == before + 1
        dist.destroy_process_group()
    assert names[0] != names[1]
    assert find_world() is None
    assert sequence_number(None) == -1
