# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different collectives in one cell are told which, and from which lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot import LaunchInterrupted, RankError, Session
from tests.dist.session.conftest import Kept, stopping_once_noted

Start = Callable[..., Session]

BRANCH = "if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(4))\ndist.all_reduce(torch.ones(4))"


def test_different_collectives_are_named_while_the_ranks_wait(start: Start, view: Kept) -> None:
    """Nothing in either rank could know; after the stop button the next cell works."""
    session = start(2)
    session.execute("import torch, torch.distributed as dist\ndist.barrier()")
    with stopping_once_noted(session, view), pytest.raises(LaunchInterrupted):
        session.execute(BRANCH, cell=7)
    assert view.notes[0] == (
        "collective 1 of the default group is not the same on all ranks: rank 0 called all_reduce in Cell In[7], line "
        "4 (dist.all_reduce(torch.ones(4))), rank 1 called barrier in Cell In[7], line 2 (dist.barrier()); press stop, "
        "and let all ranks call the same"
    )
    session.execute("dist.barrier()")


def test_sizes_that_differ_are_named_where_gloo_aborts(start: Start) -> None:
    """The rank that dies says neither line nor rank, and the other one may not even fail."""
    with pytest.raises(RankError, match=r"SIGABRT|[Cc]onnection") as caught:
        start(2).execute("import torch\ngroup.all_reduce(torch.ones(10 + rank))", cell=7)
    assert (
        "Collective 0 of the default group is not the same on all ranks: rank 0 called all_reduce (10 elements) in "
        "Cell In[7], line 2 (group.all_reduce(torch.ones(10 + rank))), rank 1 called all_reduce (11 elements)"
    ) in str(caught.value)
