# SPDX-License-Identifier: Apache-2.0
"""Which processes train alone, and the names of the times with and without a process group."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ddpilot.guard.notes import NO_GROUP
from ddpilot.guard.probes.process_groups import GroupGenerations, is_alone


@pytest.mark.parametrize(("world_size", "expected"), [("2", False), ("1", True), (None, True), ("two", True)])
def test_is_alone_without_a_group_goes_by_the_number_of_ranks_that_were_started(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, expected: bool
) -> None:
    """A rank of several may have omitted the group by mistake."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert is_alone(None) is expected


@pytest.mark.parametrize("name", ["horovod", "mpi4py.MPI"])
def test_is_alone_where_ranks_may_exchange_gradients_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing is known of what they exchange."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert is_alone(None)


def test_generations_name_the_time_before_between_and_after_groups(tmp_path: Path) -> None:
    """Each is a generation of its own, which begins once."""
    generations = GroupGenerations()
    names = []
    for number in range(2):
        assert generations.has_changed()
        assert not generations.has_changed()
        names.append(generations.name)
        dist.init_process_group("gloo", store=FileStore(str(tmp_path / str(number)), 1), rank=0, world_size=1)
        try:
            assert is_alone(dist.group.WORLD)
            assert generations.has_changed()
            assert not generations.has_changed()
            names.append(generations.name)
        finally:
            dist.destroy_process_group()
    assert len({*names}) == 4
    assert [name.startswith(NO_GROUP) for name in names] == [True, False, True, False]
