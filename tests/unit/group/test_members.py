# SPDX-License-Identifier: Apache-2.0
"""The roster in a store of this process: what one rank finds there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from ddpilot.errors import RendezvousError
from ddpilot.group.members import Member, find_sharing, take_turn, wait_for_all

ME = Member.here(0, 2, "cpu", "gloo")
OTHER = replace(ME, rank=1, host="elsewhere", pid=77)


def test_wait_for_all_returns_every_member_in_rank_order() -> None:
    """What each rank wrote comes back unchanged."""
    base = HashStore()
    take_turn(base, OTHER)
    store = take_turn(base, ME)
    assert wait_for_all(store, ME, timeout_s=1.0) == (ME, OTHER)


def test_wait_for_all_names_the_missing_ranks_when_the_time_is_up() -> None:
    """Missing ranks by number, present ones with host, pid and device."""
    me = replace(ME, world_size=4)
    base = HashStore()
    take_turn(base, replace(OTHER, rank=2, world_size=4))
    store = take_turn(base, me)
    with pytest.raises(RendezvousError) as caught:
        wait_for_all(store, me, timeout_s=0.02)
    assert caught.value.missing == (1, 3)
    assert f"ranks 1, 3 did not join within 0.02 s; joined: rank 0 ({me.place}); rank 2 (host elsewhere, " in str(
        caught.value
    )


def test_take_turn_refuses_a_rank_number_that_another_host_has() -> None:
    """Both are named, and a rank that still waits raises the same."""
    base = HashStore()
    first = take_turn(base, replace(OTHER, rank=0))
    with pytest.raises(RendezvousError, match="rank 0 was taken twice: by host elsewhere, pid 77, cpu, and by host"):
        take_turn(base, ME)
    with pytest.raises(RendezvousError, match="waiting for all ranks: rank 0 was taken twice"):
        wait_for_all(first, replace(OTHER, rank=0), timeout_s=10.0)


@pytest.mark.parametrize("before", [ME, replace(ME, started_s=1.0), replace(ME, pid=2**30)])
def test_take_turn_gives_a_new_part_of_the_store_when_the_rank_comes_again(before: Member) -> None:
    """The same process, or a later one in the place of one that ended, finds no key of the earlier turn."""
    base = HashStore()
    take_turn(base, before).set("key", "old")
    assert not take_turn(base, ME).check(["key"])


@pytest.mark.parametrize(("name", "value"), [("world_size", 3), ("backend", "nccl")])
def test_wait_for_all_refuses_ranks_that_were_started_differently(name: str, value: object) -> None:
    """The message has both values and their ranks."""
    base = HashStore()
    take_turn(base, replace(OTHER, **{name: value}))  # type: ignore[arg-type]
    store = take_turn(base, ME)
    with pytest.raises(RendezvousError, match=rf"different values of {name}: .* on ranks 0; '?{value}'? on ranks 1"):
        wait_for_all(store, ME, timeout_s=1.0)


def test_find_sharing_names_devices_with_several_ranks_of_one_host() -> None:
    """The same identity on a different host is a different device; unknown identities are ignored."""
    gpu = "cuda device 42"
    ranks = [replace(ME, rank=0, identity=gpu), replace(ME, rank=1, identity=gpu), replace(OTHER, rank=2, identity=gpu)]
    assert find_sharing([*ranks, ME, replace(ME, rank=4)]) == {f"{gpu} of host {ME.host}": (0, 1)}
