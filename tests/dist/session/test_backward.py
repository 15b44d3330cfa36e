# SPDX-License-Identifier: Apache-2.0
"""Cells that fail in the middle of a DDP model's backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpilot import RankError, Session
from tests.dist.session.conftest import MODEL, Kept

Start = Callable[..., Session]

BAD_BACKWARD = """
def bad(gradient): raise ValueError("bad gradient")
handle = next(model.parameters()).register_hook(bad)  # the last gradient to be made: the others are in the bucket
try: step()
finally: handle.remove()
"""


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_works_after_one_that_failed_before_its_first_collective(
    start: Start, view: Kept, num_steps: int
) -> None:
    """No collective was begun, but gradients wait in a bucket: without a new reducer the next step would be refused."""
    session = start(2)
    session.execute(
        MODEL.replace("torch.nn.BatchNorm1d(8)", "torch.nn.Tanh()") + f"for _ in range({num_steps}): step()"
    )
    with pytest.raises(RankError, match="bad gradient"):
        session.execute(BAD_BACKWARD)
    assert any("1 DDP model bound to it" in note for note in view.notes)
    session.execute(f"step(); assert num_steps == {num_steps + 1}")
    assert len(view.errors) == 1
