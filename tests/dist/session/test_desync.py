# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different collectives in one cell: the error names them and their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddpilot import LaunchInterrupted, RankError, Session, WatchError
from ddpilot.record.flight_ring.reader import count_begun
from ddpilot.record.hook import ring_path
from tests.dist.launching.scripts import wait_until
from tests.dist.session.conftest import Kept, stopping_once_noted

Start = Callable[..., Session]

BRANCH = "if rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(4))\ndist.all_reduce(torch.ones(4))"


def test_different_collectives_are_named_while_the_ranks_wait(start: Start, view: Kept) -> None:
    """Neither rank can detect it alone; after an interrupt the next cell works."""
    session = start(2)
    session.execute("import torch, torch.distributed as dist\ndist.barrier()")
    with stopping_once_noted(session, view), pytest.raises(LaunchInterrupted):
        session.execute(BRANCH, cell=7)
    assert view.notes[0].startswith("desync  DDP201  ")
    assert "all_reduce" in view.notes[0]
    assert "Cell In[7]:2" in view.notes[0]
    session.execute("dist.barrier()")


def test_different_collectives_end_the_cell_when_that_is_wanted(start: Start) -> None:
    """The findings are in the error; the group is rebuilt and all variables are kept."""
    session = start(2, on_finding="stop")
    session.execute("import torch, torch.distributed as dist\nkept = 3\ndist.barrier()")
    with pytest.raises(WatchError, match=r"running `Cell In\[7\]`: desync \(DDP201\)") as caught:
        session.execute(BRANCH, cell=7)
    assert [finding.code for finding in caught.value.findings] == ["DDP201"]
    session.execute("dist.barrier()")
    assert session.pull("kept") == [3, 3]


@pytest.mark.parametrize("before", ["", "group.barrier()\nif rank:\n    dist.destroy_process_group()"])
def test_a_rank_that_enters_the_group_alone_is_named(start: Start, before: str) -> None:
    """In a new session, and after that rank has left the group alone; the next cell has all ranks in one group."""
    session = start(2, on_finding="stop")
    session.execute(f"import torch.distributed as dist\nkept = 3\n{before}")
    with pytest.raises(WatchError, match="rank 1 waits for rank 0 to enter the process group") as caught:
        session.execute("if rank:\n    dist.barrier()", cell=7)
    (finding,) = caught.value.findings
    assert (finding.code, finding.place.file, finding.place.line) == ("DDP215", "Cell In[7]", 2)
    session.execute("dist.barrier()")
    assert session.pull("kept") == [3, 3]


def test_sizes_that_differ_are_named_where_gloo_aborts(start: Start) -> None:
    """The rank that dies reports neither line nor rank, and the other one may not fail at all."""
    with pytest.raises(RankError, match=r"SIGABRT|[Cc]onnection") as caught:
        start(2).execute("import torch\ngroup.all_reduce(torch.ones(10 + rank))", cell=7)
    (finding,) = caught.value.findings
    assert finding.severity == "error"
    assert (finding.place.file, finding.place.line) == ("Cell In[7]", 2)


def test_a_collective_that_one_rank_alone_called_is_not_matched_with_the_next_cell(start: Start, view: Kept) -> None:
    """A note names it and the group is rebuilt. Pending collectives of all ranks, and sends, are allowed."""
    session = start(2)
    session.execute(
        "import torch, torch.distributed as dist\nx = torch.ones(1)\nwork = dist.all_reduce(x, async_op=True)"
    )
    session.execute("work.wait()\nif rank == 0:\n    sent = dist.isend(x, 1)\nelse:\n    dist.recv(x, 0)")
    assert not view.notes
    session.execute("if rank == 0:\n    y = torch.full((1,), 100.0)\n    dist.all_reduce(y, async_op=True)", cell=7)
    assert view.notes[0].startswith(
        "the ranks have begun different numbers of collectives in the default group: 2 on rank 0, 1 on rank 1; rank 1 "
        "did not call #1: all_reduce, Cell In[7]:3. "
    )
    assert "rebuilt" in view.notes[1]
    session.execute("x = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)")
    assert [each.item() for each in session.pull("x")] == [3.0, 3.0]
    assert session.pull("y", rank=0).item() == 100.0


def test_collectives_count_that_ranks_begin_before_the_cell_is_observed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of a busy machine may come to observe a cell long after the ranks wait in it."""
    session = start(2, on_finding="stop")
    session.execute("import torch, torch.distributed as dist\ndist.barrier()")
    states = session._kernels.states
    note_work = states.note_work

    def note_work_late(*args: Any) -> None:
        wait_until(lambda: all(count_begun(path) != num for path, num in before.items()))
        note_work(*args)

    rings = [ring_path(session._kernels.ring_folder, rank) for rank in range(2)]
    before = {path: count_begun(path) for path in rings}
    monkeypatch.setattr(states, "note_work", note_work_late)
    with pytest.raises(WatchError, match=r"running `Cell In\[7\]`: desync \(DDP201\)"):
        session.execute(BRANCH, cell=7)
