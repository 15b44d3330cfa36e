# SPDX-License-Identifier: Apache-2.0
"""What guard finds in the last part of a cell is reported when the cell ends, however short the cell was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot import RankError, Session, WatchError
from ddpilot.findings.finding import Finding
from tests.dist.session.conftest import Kept

Start = Callable[..., Session]

MODEL = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
num_run = 0
def train(used, num_steps):
    for _ in range(num_steps):
        used(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train(model, 2)
"""
PAST_DDP = "train(model.module, 2)\ntrain(model, 4)"


@pytest.fixture(autouse=True)
def only_at_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell of these tests is long enough for a look while it runs, also on a slow machine."""
    monkeypatch.setattr("ddpilot.watch.observer.INTERVAL_S", 60.0)


def test_a_short_cell_that_trains_past_ddp_is_reported_when_it_ends(start: Start, view: Kept) -> None:
    """Once: a later cell does not report it, also after one that failed."""
    session = start(2, on_finding="report")
    session.execute(MODEL)
    session.execute("num_run += 1")
    assert not [each for each in view.notes if "DDP" in each]
    session.execute(PAST_DDP, cell=7)
    (note,) = [each for each in view.notes if "DDP321" in each]
    session.execute("num_run += 1")
    assert [each for each in view.notes if "DDP321" in each] == [note]
    with pytest.raises(RankError, match="bad sample"):
        session.execute(f"{PAST_DDP}\nraise ValueError('bad sample')", cell=9)
    session.execute("num_run += 1")
    assert [each for each in view.notes if "DDP321" in each] == [note]
    assert session.pull("num_run") == [3, 3]


@pytest.mark.parametrize("on_finding", ["stop", lambda _finding: "stop"], ids=["stop", "function"])
def test_a_short_cell_that_trains_past_ddp_raises_once(
    start: Start, view: Kept, on_finding: str | Callable[[Finding], str]
) -> None:
    """The error of a cell that has ended leaves the group as it is, and the next cells run."""
    session = start(2, on_finding=on_finding)
    session.execute(MODEL)
    with pytest.raises(WatchError, match=r"running `Cell In\[7\]`.*DDP321"):
        session.execute(PAST_DDP, cell=7)
    session.execute("num_run += 1\ngroup.barrier()", cell=8)
    assert session.pull("num_run") == [1, 1]
    assert [type(error) for error in view.errors] == [WatchError]
    assert not [each for each in view.notes if "group" in each]
