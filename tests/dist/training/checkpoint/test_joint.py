# SPDX-License-Identifier: Apache-2.0
"""Ranks save together, resume exactly at any number of ranks after a kill, and fail together."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddpilot import RankError
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import CheckpointError
from ddpilot.training.loop import Loop
from tests.dist.training.bodies import launch
from tests.dist.training.checkpoint.bodies import BATCHES_PER_EPOCH, NUM_SAMPLES, fail_jointly, train

NUM_STEPS = 2 * BATCHES_PER_EPOCH


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank gives that is never stopped."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(launch(1, train, Path(folder), NUM_STEPS)[0])


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(30 if os.environ.get("DDPILOT_SOAK") else 1))
def test_resume_is_exact_when_a_rank_was_killed_in_a_save_and_the_world_size_changes(
    tmp_path: Path, alone: dict[str, Any], trial: int
) -> None:
    """Any rank, any step, from N to M ranks: every epoch is of every sample once, and the weights are the same."""
    chance = random.Random(trial)
    before, after = (2, 4) if trial == 0 else (chance.randint(1, 4), chance.randint(1, 4))
    killed = (chance.randrange(before), chance.randint(1, NUM_STEPS))
    with pytest.raises(RankError, match="SIGKILL"):
        launch(before, train, tmp_path, NUM_STEPS, killed=killed)
    found = CheckpointDir(tmp_path).latest()
    step = 0 if found is None else found.manifest.progress.step
    assert killed[1] - 1 <= step <= killed[1]
    resumed = launch(after, train, tmp_path, NUM_STEPS)
    for result in resumed:
        assert result["first"] == step
        for name, weight in alone["weights"].items():
            distance = (result["weights"][name] - weight).norm() / weight.norm()
            assert distance < 1e-10, f"{name} differs by {distance:.1e}"
    words = f"rank {killed[0]} of {before} killed at step {killed[1]}, resumed with {after}"
    check_each_sample_once(alone["taken"], [result["taken"] for result in resumed], step, words)


def check_each_sample_once(
    expected: dict[int, list[int]], by_rank: list[dict[int, list[int]]], first: int, words: str
) -> None:
    """The steps before `first` of one rank alone and those after it of the ranks make up whole epochs."""
    taken = {step: samples for step, samples in expected.items() if step < first}
    for step in range(first, NUM_STEPS):
        taken[step] = [sample for rank in by_rank for sample in rank[step]]
    for epoch in range(2):
        steps = range(epoch * BATCHES_PER_EPOCH, (epoch + 1) * BATCHES_PER_EPOCH)
        assert sorted(sample for step in steps for sample in taken[step]) == list(range(NUM_SAMPLES)), words


class Moody:
    """Has a state, but on one rank."""

    def state_dict(self) -> dict[str, Any]:
        """Fails on rank 0."""
        if int(os.environ["RANK"]) == 0:
            raise RuntimeError("no state")
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


def save_with_a_moody_thing(folder: Path) -> str:
    """What a save raises on this rank, of which rank 0 cannot collect a part."""
    loop = Loop(checkpoint_dir=folder, progress=False)
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))  # whose buffers are exchanged after that thing failed
    loop.prepare(Moody(), model)
    try:
        loop.save()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_save_fails_on_all_ranks_if_one_cannot_collect_its_part(tmp_path: Path) -> None:
    """No rank waits in a collective that another one never calls."""
    zero, one = launch(2, save_with_a_moody_thing, tmp_path)
    assert zero == one
    assert zero.startswith("[rank 0] collecting the state to save: 'moody' (Moody) raised RuntimeError: no state")


def test_joint_calls_fail_on_all_ranks_when_one_cannot(tmp_path: Path) -> None:
    """A directory that cannot be written, values that cannot be saved, a directory that one rank does not see."""
    first, second = launch(2, fail_jointly, tmp_path)
    assert first == second
    assert "File exists (FileExistsError). Training has not started" in first[0]
    assert first[1].startswith("[rank 1] copying the state to save: ['fn'] is a builtins.builtin_function")
    assert first[2].startswith("copying the state to save: ['state']['fn'] is a builtins.builtin_function")
    assert first[3] == f"[rank 0] using {tmp_path}/good: RuntimeError: no value"
    assert first[4] == "[rank 1] using a checkpoint: KeyError: 'it'"
    assert first[5].startswith("[rank 1] opening the checkpoint that rank 0 found")
    assert "this rank cannot read it: manifest.json cannot be read" in first[5]
