# SPDX-License-Identifier: Apache-2.0
"""A cell that waits for a number of the device never goes on with what came of an aborted collective."""

from __future__ import annotations

import time

import pytest
import torch

from ddpilot import RankError, Session
from tests.accelerator import SITE, environment, why_not
from tests.accelerator.sessions import HEALTHY, MODEL
from tests.dist.session.conftest import Kept

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
    pytest.mark.timeout(120),
]


def test_a_cell_is_interrupted_before_the_wait_that_freeing_ends_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """`item()` returns without an error once the collective is aborted; its number reaches no line of the cell."""
    assert torch.__version__  # is loaded here: this process is to have no device
    monkeypatch.syspath_prepend(str(SITE))
    view = Kept()
    with Session(2, env=environment(2), view=view) as session:
        # The first two steps agree on DDP's buckets, for which the host waits in the forward pass.
        session.execute(MODEL + "for _ in range(4): step().item()\nseen = []")
        with pytest.raises(RankError, match="rank 1 raised ValueError: boom"):
            session.execute(
                "if rank == 1:\n    time.sleep(1)\n    raise ValueError('boom')\n"
                "loss = step()\nseen.append(loss.item())"
            )
        assert session.pull("seen") == [[], []]
        began_s = time.monotonic()
        session.execute(HEALTHY)
        assert time.monotonic() - began_s < 10
    assert not [note for note in view.notes if note.startswith("killing")]
