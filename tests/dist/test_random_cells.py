# SPDX-License-Identifier: Apache-2.0
"""The first 10 random cells of benchmarks/random_cells.py; the soak runs all 300. Of each kind: tests/dist/session."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.cell_faults import KINDS, draw_cells
from benchmarks.cell_model import NUM_RANKS, Expected, loss_of, make_net, make_optimizer, snapshot
from benchmarks.random_cells import BLOCKED_LIMIT_S, SHOWN_LIMIT_S, play_cells

CELLS = draw_cells(300)
PART = 10
IS_SOAK = os.environ.get("DDPILOT_SOAK") == "1"
NUM_PARTS = len(CELLS) // PART if IS_SOAK else 1
PATIENCE = 1.0 if IS_SOAK else 3.0


@pytest.mark.soak
@pytest.mark.timeout(170)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_session_survives_random_faults_with_every_variable_and_never_blocks(part: int) -> None:
    """Ranks raise, die, hang and are stopped; survivors hold what they must, the model trains on, no orphan is left."""
    play = play_cells(CELLS[part * PART : (part + 1) * PART], patience=PATIENCE)
    assert not play.wrong, "\n".join(play.wrong)
    assert len(play.blocked_s) > PART
    assert max(play.blocked_s) <= BLOCKED_LIMIT_S * PATIENCE
    assert max(play.shown_s) <= SHOWN_LIMIT_S * PATIENCE


def test_draw_cells_is_the_same_each_time_and_leaves_no_kind_out() -> None:
    """A failure can be repeated, and every kind comes before one comes again."""
    assert draw_cells(PART) == CELLS[:PART]
    assert {drawn.kind for drawn in CELLS[: len(KINDS)]} == set(KINDS)
    assert all(drawn.rank != drawn.other for drawn in CELLS)
    for number, drawn in enumerate(CELLS[: len(KINDS)]):
        compile(drawn.code(number), "cell", "exec")


def test_expected_is_what_an_optimizer_makes_of_the_mean_loss_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's own arithmetic, against torch's optimizer on one process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch's optimizers would set it
    net = make_net(5)
    optimizer = make_optimizer(net)
    states = [snapshot(net, optimizer)]
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of(net, 5, step, rank) for rank in range(NUM_RANKS)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        states.append(snapshot(net, optimizer))
    expected = Expected(5)
    for step, state in enumerate(states):
        assert torch.allclose(state, expected.after(step), rtol=1e-12, atol=1e-14)
    assert not torch.allclose(states[0], states[1])
