# SPDX-License-Identifier: Apache-2.0
"""Count the steps that accumulate gradients with every backward reduced."""

from __future__ import annotations

import pytest
import torch

from ddpilot.guard.probes.parameters.ddp_model import NUM_STEPS, SyncedBackwards

LINE = {"file": "train.py", "line": 7}


def follow(*steps: list[tuple[int, int, bool]]) -> SyncedBackwards:
    """The state after `steps`, lists of backwards: states before and after each, and whether it was reduced."""
    synced = SyncedBackwards([torch.zeros(10)])
    for backwards in steps:
        for before, after, is_reduced in backwards:
            synced.backward(LINE, before, after, is_reduced=is_reduced)
        synced.step()
    return synced


TWO, THREE = [(0, 1, True), (1, 2, True)], [(0, 1, True), (1, 2, True), (2, 3, True)]


def test_accumulation_is_known_after_so_many_steps() -> None:
    """With the numbers of backwards, and the bytes that each exchanges."""
    assert not follow(*[THREE] * (NUM_STEPS - 1)).is_over
    synced = follow(*[THREE] * (NUM_STEPS - 1), TWO)
    assert (min(synced.counts), max(synced.counts), synced.num_bytes) == (2, 3, 40)
    assert synced.is_over


@pytest.mark.parametrize(
    "step",
    [
        [(0, 1, True)],
        [(0, 1, False), (1, 2, True)],
        [(0, 1, True), (0, 2, True)],
    ],
    ids=["one backward", "the first in no_sync", "gradients are cleared in between"],
)
def test_other_programs_are_over_after_three_steps(step: list[tuple[int, int, bool]]) -> None:
    """They write no notes, and are no longer observed."""
    assert not follow(step, step).is_over
    synced = follow(step, step, step)
    assert synced.is_over
    assert not synced.counts


def test_two_lines_are_two_losses() -> None:
    """As for a critic, with real and fake samples."""
    synced = SyncedBackwards([])
    for _ in range(3):
        synced.backward({"file": "train.py", "line": 1}, 0, 1, is_reduced=True)
        synced.backward({"file": "train.py", "line": 2}, 1, 2, is_reduced=True)
        synced.step()
    assert synced.is_over
    assert not synced.counts


def test_a_step_of_another_optimizer_counts_for_nothing() -> None:
    """Two optimizers, each of a part of the model, step after the same backwards."""
    assert max(follow(*[THREE, []] * NUM_STEPS).counts) == 3
