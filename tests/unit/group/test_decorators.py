# SPDX-License-Identifier: Apache-2.0
"""Decorated functions without a process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpilot.errors import GroupError
from ddpilot.group.decorators import on_ranks, rank_zero_only


@pytest.fixture
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 1 of two, before anything entered a group."""
    names = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


def test_rank_zero_only_runs_when_alone() -> None:
    """A process that belongs to no job is its own rank 0."""
    assert rank_zero_only(lambda x: x + 1)(1) == 2


def test_on_ranks_runs_when_alone_whatever_its_ranks() -> None:
    """A single process runs it itself, also with broadcast."""
    assert on_ranks(3, broadcast=True)(lambda: "ran")() == "ran"


@pytest.mark.usefixtures("rank_1_of_2")
def test_on_ranks_follows_the_topology_when_there_is_no_group_yet() -> None:
    """Only the ranks that were named run it."""
    assert rank_zero_only(lambda: "ran")() is None
    assert on_ranks(1)(lambda: "ran")() == "ran"


@pytest.mark.usefixtures("rank_1_of_2")
def test_on_ranks_cannot_broadcast_when_there_is_no_group_yet() -> None:
    """A value cannot get to the other ranks: that is an error, not a None."""
    with pytest.raises(GroupError, match=r"there is no process group yet.*Call init_group"):
        on_ranks(0, broadcast=True)(lambda: "ran")()


@pytest.mark.usefixtures("rank_1_of_2")
def test_on_ranks_refuses_a_rank_that_the_topology_does_not_have() -> None:
    """The rank and the range are named."""
    with pytest.raises(GroupError, match="rank 2 does not exist: the group has ranks 0 to 1"):
        on_ranks(2)(lambda: "ran")()


def test_on_ranks_keeps_name_and_docstring() -> None:
    """The decorated function still looks like itself."""

    @on_ranks(0)
    def save() -> None:
        """Save it."""

    assert (save.__name__, save.__doc__) == ("save", "Save it.")


@pytest.mark.parametrize("ranks", [(), (-1,), (0, "1"), (True,)])
def test_on_ranks_refuses_what_are_no_ranks(ranks: tuple[int, ...]) -> None:
    """At decoration, with the values."""
    with pytest.raises(GroupError, match="decorating with on_ranks: ranks"):
        on_ranks(*ranks)


def test_on_ranks_refuses_functions_whose_body_runs_later() -> None:
    """A generator would run after the ranks have agreed that it went well."""

    def batches() -> Iterator[int]:
        yield 1

    async def save() -> None: ...

    with pytest.raises(GroupError, match=r"decorating batches\(\).*generator or a coroutine"):
        on_ranks(0)(batches)
    with pytest.raises(GroupError, match=r"decorating save\(\)"):
        rank_zero_only(save)
