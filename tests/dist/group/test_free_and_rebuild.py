# SPDX-License-Identifier: Apache-2.0
"""Freeing ranks that are stuck in C++, and rebuilding their group with every variable kept."""

from __future__ import annotations

import pytest

from tests.dist.group.ranks import RunRanks
from tests.soak import often

KINDS = ["same", "different", "new_group", "store_wait", "recv", "send", "backward"]
FREE = {"same": [-1], "new_group": [0], "backward": [0]}
"""The ranks that are not stuck, where it is not all of them that are."""

AT_ONCE_S = 10.0
"""Freed at once, on a machine busy with other tests; a rank that is not freed waits for the group's 300 s."""


@often("4")
@pytest.mark.parametrize("world_size", [2, 4, 6])
def test_free_group_frees_every_stuck_rank_and_rebuild_group_trains_on(run_ranks: RunRanks, world_size: int) -> None:
    """In every kind of stuckness, with a live DDP model: all ranks return at once, and the next step is right."""
    run = run_ranks("freeing.free_and_rebuild", world_size, args=(KINDS,), timeout_s=120)
    ranks = range(world_size)
    mean = sum(rank + 1 for rank in ranks) / world_size
    for rank, seen in enumerate(run.results):
        assert [entry["kind"] for entry in seen] == KINDS
        for step, entry in enumerate(seen):
            not_stuck = [ranks[position] for position in FREE.get(entry["kind"], [])]
            assert bool(entry["error"]) == (rank not in not_stuck), entry
            assert entry["seconds"] < AT_ONCE_S, entry
            assert entry["total"] == sum(rank + 1 for rank in ranks), entry
            # One step before the first freeing, one after each.
            assert entry["weights"] == pytest.approx([-mean * (step + 2)] * 3), entry
            assert (entry["rebound"], entry["unbound"], entry["disagreements"]) == (1, [], []), entry
            assert entry["still_stuck"] == [], entry


def test_free_group_frees_a_rank_whose_peers_keep_their_ends(run_ranks: RunRanks) -> None:
    """One rank alone gets itself out: it does not need its peers to close anything."""
    assert run_ranks("freeing.free_one_rank_only", 2).results == [True, True]


def test_free_group_frees_subgroups_and_spares_the_users_sockets(run_ranks: RunRanks) -> None:
    """A group that user code made is freed; the user's own loopback connection and epoll go on working."""
    for seen in run_ranks("freeing.free_beside_users_sockets", 2).results:
        assert seen["heard"] == "still here"
        assert seen["error"]


def test_free_group_says_so_when_a_receive_from_any_source_stays_stuck(run_ranks: RunRanks) -> None:
    """What cannot be freed is reported, so that the rank can be ended instead."""
    for said in run_ranks("freeing.recv_from_any", 2).results:
        assert said == ["thread 'receiver' waits in recv() from any source, which nothing can free: end this rank"]


def test_rebuild_group_names_what_differs_and_what_it_could_not_bind(run_ranks: RunRanks) -> None:
    """A parameter that differs on one rank and a model on a smaller group are named; hooks are registered again."""
    run = run_ranks("freeing.rebuild_with_differences", 3)
    for rank, seen in enumerate(run.results):
        assert seen["disagreements"] == ["parameter 0.weight of Sequential differs: ranks 0, 1 against ranks 2"]
        assert seen["unbound"] == (["Linear was on a group of 2 ranks: wrap it again"] if rank < 2 else [])
        assert (seen["rebound"], seen["hooked"]) == (1, 1)


def test_leave_returns_at_once_when_the_group_was_freed(run_ranks: RunRanks) -> None:
    """A freed group is refused, left quickly, and a rank without any old group can be part of a rebuilt one."""
    for seen in run_ranks("freeing.leave_when_freed", 2).results:
        assert "its store does not answer: it was freed" in seen["said"]
        assert seen["seconds"] < 4.0  # not the 5 s that it gives peers
        assert seen["total"] == 2.0
