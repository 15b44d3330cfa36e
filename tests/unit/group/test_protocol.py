# SPDX-License-Identifier: Apache-2.0
"""The fake group: any rank and size, in process."""

from __future__ import annotations

import pytest
import torch

from ddpilot.errors import GroupError
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import FakeGroup, GroupLike


def _mean_over_ranks(group: GroupLike, value: float) -> float:
    return float(group.all_reduce(torch.tensor(value), "avg"))


def test_fake_group_stands_in_where_a_group_is_expected() -> None:
    """Code written against the protocol takes it; nothing of torch.distributed is needed."""
    assert _mean_over_ranks(FakeGroup(1, 3), 5.0) == 5.0
    assert not torch.distributed.is_initialized()


def test_fake_group_has_everything_that_a_group_shares_with_it() -> None:
    """Every name of the protocol is on both, so that neither can drift away."""
    names = {name for name in vars(GroupLike) if not name.startswith("_")}
    assert {"rank", "world_size", "barrier", "all_reduce", "leave"} <= names
    for kind in (FakeGroup, Group):
        fields = set(kind.__dataclass_fields__)
        assert names <= fields | set(dir(kind))


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", [6.0, -3.0]), ("avg", [2.0, -1.0]), ("min", [2.0, -1.0]), ("product", [8.0, -1.0])]
)
def test_fake_group_reduces_as_if_every_rank_held_the_same(op: str, expected: list[float]) -> None:
    """In place, with the shape kept."""
    tensor = torch.tensor([2.0, -1.0])
    assert FakeGroup(0, 3).all_reduce(tensor, op) is tensor  # type: ignore[arg-type]
    assert tensor.tolist() == expected


def test_fake_group_gathers_and_broadcasts_the_same_value() -> None:
    """One entry for each rank; what is broadcast is what this rank holds."""
    with FakeGroup(2, 4) as group:
        group.barrier()
        assert group.all_gather_object("x") == ["x"] * 4
        assert group.broadcast_object("y", src=3) == "y"
        assert group.broadcast(torch.ones(2)).tolist() == [1.0, 1.0]
    group.leave()


def test_fake_group_fills_one_node_after_the_other() -> None:
    """Rank 5 of 8 on nodes of 4 is rank 1 of node 1."""
    group = FakeGroup(5, 8, local_world_size=4)
    assert (group.local_rank, group.topology.node_rank, group.topology.nnodes) == (1, 1, 2)
    assert (group.is_rank_zero, FakeGroup().is_rank_zero) == (False, True)
    assert (group.topology.is_distributed, FakeGroup().topology.is_distributed) == (True, False)


@pytest.mark.parametrize(("rank", "world_size", "local"), [(3, 3, 0), (-1, 2, 0), (0, 0, 0), (0, 4, 3)])
def test_fake_group_refuses_sizes_that_do_not_fit(rank: int, world_size: int, local: int) -> None:
    """The values are in the message."""
    with pytest.raises(GroupError, match=f"rank={rank}, world_size={world_size}"):
        FakeGroup(rank, world_size, local)


def test_fake_group_refuses_a_source_that_does_not_exist() -> None:
    """A broadcast from a rank beyond the group is an error here as in a real one."""
    with pytest.raises(GroupError, match="`src` is 2 and the ranks are 0 to 1"):
        FakeGroup(0, 2).broadcast_object("x", src=2)
