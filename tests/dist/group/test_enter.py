# SPDX-License-Identifier: Apache-2.0
"""Entering and leaving a group on real ranks."""

from __future__ import annotations

import os
import re
import socket

import pytest

from tests.dist.group.ranks import RunRanks

NOBODY = -1


@pytest.mark.parametrize("agent", [True, False], ids=["agent_store", "store_of_rank_0"])
def test_init_group_enters_a_working_group(run_ranks: RunRanks, agent: bool) -> None:
    """Every rank sees the same group, its collectives give the right numbers, and nothing of it is left after it."""
    run = run_ranks("entering.all_reduce_once", 3, agent=agent)
    for rank, seen in enumerate(run.results):
        assert (seen["rank"], seen["local_rank"], seen["world_size"]) == (rank, rank, 3)
        assert (seen["total"], seen["mean"], seen["tensor"]) == (6.0, 1.0, 1.0)
        assert (seen["device"], seen["backend"], seen["adopted"], seen["same"]) == ("cpu", "gloo", False, True)
        assert seen["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert seen["from_one"] == "of rank 1"
        assert seen["listening"] == ["127.0.0.1"]
        assert (seen["live"], seen["threads"], seen["same_environ"]) == (False, [], True)
    assert run.logs == ["", "", ""]


@pytest.mark.parametrize("agent", [True, False], ids=["agent_store", "store_of_rank_0"])
def test_init_group_enters_again_at_once_after_leaving(run_ranks: RunRanks, agent: bool) -> None:
    """Five groups one after the other on one store meet no key of an earlier one."""
    run = run_ranks("entering.enter_leave_enter", 2, agent=agent, args=(5,))
    assert run.results == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2


def test_init_group_works_alone_with_ddp(run_ranks: RunRanks) -> None:
    """Without a launcher's environment a DDP model trains in a real group of one rank, and no store is opened."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    env = dict.fromkeys([*names, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"], "")
    run = run_ranks("entering.train_alone", 1, agent=False, env=env)
    assert run.results[0] == {"environment": "alone", "world_size": 1, "weight": -1.0, "listening": ["127.0.0.1"]}


def test_init_group_names_the_rank_that_never_came(run_ranks: RunRanks) -> None:
    """A rank that never enters is named after the timeout, with the ranks that joined."""
    run = run_ranks("entering.error_of_entering", 3, args=(2, {}, 2.0))
    for seen in run.results[:2]:
        assert (seen["type"], seen["missing"]) == ("RendezvousError", [2])
        assert f"rank 2 did not join within 2 s; joined: rank 0 (host {socket.gethostname()}, pid " in seen["text"]
        assert 2.0 <= seen["seconds"] < 15.0


def test_init_group_names_both_when_a_rank_number_is_taken_twice(run_ranks: RunRanks) -> None:
    """Two processes with one rank number learn of each other, and so does a third rank, long before the time is up."""
    run = run_ranks("entering.error_of_entering", 3, args=(NOBODY, {"2": {"RANK": "0", "LOCAL_RANK": "0"}}, 60.0))
    host = socket.gethostname()
    pids = {run.results[0]["pid"], run.results[2]["pid"]}
    for seen in run.results:
        assert "rank 0 was taken twice: by" in seen["text"]
        assert all(f"host {host}, pid {pid}" in seen["text"] for pid in pids)
        assert seen["seconds"] < 10.0


def test_init_group_says_which_ranks_disagree_on_the_world_size(run_ranks: RunRanks) -> None:
    """Ranks with different world sizes raise instead of waiting for each other."""
    changes = {"1": {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}}
    run = run_ranks("entering.error_of_entering", 2, args=(NOBODY, changes, 60.0))
    for seen in run.results:
        assert "the ranks have different values of world_size: 2 on ranks 0; 3 on ranks 1" in seen["text"]
        assert seen["seconds"] < 10.0


def test_init_group_says_which_ranks_disagree_on_the_backend(run_ranks: RunRanks) -> None:
    """Ranks with different backends are named with what each was given."""
    run = run_ranks("entering.error_of_entering", 2, args=(NOBODY, {"1": {"DDPILOT_BACKEND": "cpu:gloo"}}, 20.0))
    for seen in run.results:
        assert "the ranks have different values of backend: 'gloo' on ranks 0; 'cpu:gloo' on ranks 1" in seen["text"]
        assert seen["seconds"] < 10.0


def test_init_group_says_at_once_when_the_host_name_does_not_resolve(run_ranks: RunRanks) -> None:
    """A wrong MASTER_ADDR is reported in under 3 seconds (torch alone takes 26)."""
    changes = {"1": {"MASTER_ADDR": "no-such-host.invalid"}}
    seen = run_ranks("entering.error_of_entering", 2, args=(0, changes, 60.0)).results[1]
    assert "MASTER_ADDR=no-such-host.invalid: the name does not resolve" in seen["text"]
    assert seen["seconds"] < 3.0


def test_init_group_names_the_holder_when_the_port_is_taken(run_ranks: RunRanks) -> None:
    """Rank 0 names the process that listens on the port it is to open."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        changes = {"0": {"MASTER_PORT": str(taken.getsockname()[1])}}
        seen = run_ranks("entering.error_of_entering", 2, agent=False, args=(1, changes, 20.0)).results[0]
    assert f"the port is taken by pid {os.getpid()}: " in seen["text"]
    assert seen["seconds"] < 10.0


def test_init_group_says_who_does_not_answer_when_rank_0_is_not_there(run_ranks: RunRanks) -> None:
    """A different rank reports that rank 0's store does not answer, with its address."""
    seen = run_ranks("entering.error_of_entering", 2, agent=False, args=(0, {}, 1.0)).results[1]
    assert re.search(r"waiting for rank 0: no answer from 127.0.0.1:\d+ for 1 s", seen["text"])
    assert seen["missing"] == [0]


def test_init_group_adopts_a_group_that_user_code_made(run_ranks: RunRanks) -> None:
    """An adopted group works, stays after leave, is destroyed on request, and refuses a different backend."""
    run = run_ranks("entering.adopt_a_group", 2)
    for rank, seen in enumerate(run.results):
        assert (seen["adopted"], seen["rank"], seen["total"]) == (True, rank, 2.0)
        assert (seen["kept"], seen["destroyed"]) == (True, True)
        assert "exists, and 'nccl' was requested" in seen["refused"]


def test_init_group_seeds_all_ranks_alike(run_ranks: RunRanks) -> None:
    """With `seed`, Python, torch and numpy draw the same numbers on every rank."""
    first, second = run_ranks("entering.seeded", 2, args=(7,)).results
    assert first == second


def test_group_is_left_at_exit_when_nobody_left_it(run_ranks: RunRanks) -> None:
    """Ranks that return without leaving end cleanly, quickly and without a word."""
    run = run_ranks("entering.end_without_leaving", 2, args=(NOBODY,))
    assert run.codes == [0, 0]
    assert run.logs == ["", ""]


def test_group_is_left_at_exit_when_a_peer_was_killed(run_ranks: RunRanks) -> None:
    """A rank does not wait at its exit for a peer that was killed."""
    run = run_ranks("entering.end_without_leaving", 3, args=(1,), may_fail=True)
    assert run.codes == [0, -9, 0]


@pytest.mark.parametrize("init", ["env", "tutorial", "tcp"])
def test_raw_groups_meet_again_and_again_on_a_launchs_store(run_ranks: RunRanks, init: str) -> None:
    """Raw init_process_group, destroy, init again works, also with a tutorial's own address and port."""
    run = run_ranks("entering.raw_groups", 2, args=(init, 3))
    assert run.results == [[1.0, 3.0, 5.0]] * 2
