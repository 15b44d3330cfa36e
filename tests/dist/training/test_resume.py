# SPDX-License-Identifier: Apache-2.0
"""A run that is ended at any moment, in any way, goes on as if nothing had been, at any number of ranks."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpilot import RankError
from ddpilot.checkpoint.directory import CheckpointDir
from tests.dist.training.bodies import launch
from tests.dist.training.resuming import (
    GLOBAL_BATCH_SIZE,
    NUM_EPOCHS,
    NUM_SAMPLES,
    Kill,
    fail_together,
    read_log,
    train,
    train_on_a_full_disk,
)

BATCHES = -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)
NUM_TRIALS = 50
ENDS = ("SIGKILL", "SIGTERM", "save", "SIGUSR1")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank gives that is never ended."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(launch(1, train, Path(folder), every=100)[0])


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trial", range(NUM_TRIALS) if os.environ.get("DDPILOT_SOAK") else range(4))
def test_resume_loses_no_sample_when_ended_at_random(tmp_path: Path, alone: dict[str, Any], trial: int) -> None:
    """From N to M ranks, once or twice: each epoch has every sample once, and the weights are those of one rank."""
    chance = random.Random(trial)
    folder, log = tmp_path / "ckpt", tmp_path / "log"
    taken: dict[tuple[int, int], list[int]] = {}
    words, position = [], (0, 0)
    for attempt in range(chance.choice((1, 1, 2))):
        num_ranks = chance.randint(1, 4)
        after = (position[0] * BATCHES + position[1], NUM_EPOCHS * BATCHES - 3)
        at = chance.randint(*after) if after[0] < after[1] else after[0]
        how = ENDS[(trial + attempt) % 4]
        kill: Kill = {"how": how, "rank": chance.randrange(num_ranks), "epoch": at // BATCHES, "batch": at % BATCHES}
        words.append(f"{kill} of {num_ranks} ranks")
        (own := log / str(attempt)).mkdir(parents=True)
        exitcode = end_early(num_ranks, folder, kill, chance.randint(1, 4), own)
        position = check_latest(folder, None if exitcode == -9 else at)
        # A signal may come so late that training is over before all ranks know of it.
        assert exitcode == (-9 if how in ("SIGKILL", "save") else 0 if position[0] == NUM_EPOCHS else 75), words
        taken = {key: samples for key, samples in (taken | read_log(own)).items() if key < position}
    num_ranks = chance.randint(1, 4)
    (own := log / "last").mkdir(parents=True)
    results = launch(num_ranks, train, folder, every=chance.randint(1, 4), log=own)
    said = f"{'; '.join(words)}; then {num_ranks} ranks"
    assert {result["first"] for result in results} == {position}, said
    later = read_log(own)
    assert not later or min(later) >= position, said
    check_each_sample_once(taken | later, said)
    for result in results:
        check_same(result, alone, said)


def end_early(num_ranks: int, folder: Path, kill: Kill, every: int, log: Path) -> int:
    """Train and be killed; the exit code of the rank that failed first, 0 where none did."""
    try:
        launch(num_ranks, train, folder, kill=kill, every=every, log=log)
    except RankError as ended:
        return ended.exitcode
    return 0


def check_latest(folder: Path, at: int | None) -> tuple[int, int]:
    """Epoch and batch where a new run goes on; the latest is whole, and after a signal in batch `at` it is later."""
    told: list[str] = []
    found = CheckpointDir(folder, report=told.append).latest()
    assert told == []
    if found is None:
        assert at is None
        return 0, 0
    assert (folder / "latest").read_text().strip() == found.path.name
    progress = found.manifest.progress
    number = progress.epoch * BATCHES + progress.batch
    assert progress.samples_seen == progress.epoch * NUM_SAMPLES + min(progress.batch * GLOBAL_BATCH_SIZE, NUM_SAMPLES)
    assert at is None or at < number, f"it stands at batch {number} after a signal in batch {at}"
    return progress.epoch, progress.batch


def check_each_sample_once(taken: dict[tuple[int, int], list[int]], said: str) -> None:
    """Over all batches of each epoch."""
    for epoch in range(NUM_EPOCHS):
        samples = [sample for (of, _), numbers in taken.items() if of == epoch for sample in numbers]
        assert sorted(samples) == list(range(NUM_SAMPLES)), f"epoch {epoch}: {said}"


def check_same(result: dict[str, Any], alone: dict[str, Any], said: str) -> None:
    """To the order of summation."""
    assert result["num_updates"] == alone["num_updates"], said
    assert result["lr"] == alone["lr"], said
    assert result["metric"] == pytest.approx(alone["metric"], rel=1e-10), said
    for name, weight in alone["weights"].items():
        distance = (result["weights"][name] - weight).norm() / weight.norm()
        assert distance < 1e-10, f"{name} differs by {distance:.1e}: {said}"


def test_resume_is_bit_identical_at_the_same_world_size(tmp_path: Path) -> None:
    """With dropout, BatchNorm, AdamW, a schedule and an average, killed in the middle of an epoch."""
    whole = launch(2, train, tmp_path / "whole", dropout=0.4, every=100)
    kill: Kill = {"how": "SIGKILL", "rank": 1, "epoch": 1, "batch": 4}
    with pytest.raises(RankError, match="SIGKILL"):
        launch(2, train, tmp_path / "parts", dropout=0.4, kill=kill)
    resumed = launch(2, train, tmp_path / "parts", dropout=0.4, every=100)
    for before, after in zip(whole, resumed, strict=True):
        assert after["first"] in ((1, 2), (1, 4)), "the save of the update before was under way, or was finished"
        assert after["metric"] == before["metric"]
        for name, weight in before["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


def test_resume_of_a_sharded_optimizer_goes_on_with_another_number_of_ranks_and_without_sharding(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    """From two ranks, each with half of the state, to three, and to one."""
    kill: Kill = {"how": "SIGKILL", "rank": 0, "epoch": 0, "batch": 6}
    with pytest.raises(RankError, match="SIGKILL"):
        launch(2, train, tmp_path, shard="optimizer", kill=kill)
    with pytest.raises(RankError, match="SIGKILL"):
        launch(3, train, tmp_path, shard="optimizer", kill={**kill, "epoch": 1})
    (result,) = launch(1, train, tmp_path)
    assert result["first"][0] == 1
    assert result["first"][1] > 0
    check_same(result, alone, "sharded, then not")


def test_ranks_are_refused_together_when_one_cannot_go_on(tmp_path: Path) -> None:
    """A directory that is none; a model, or a file, that does not fit on one rank: nothing is changed on any."""
    first, second = launch(2, fail_together, tmp_path)
    assert first == second
    no_folder, other_model, other_load, no_file = first
    assert "File exists (FileExistsError). Training has not started." in no_folder
    assert other_model.startswith("MismatchedCheckpointError: [rank 1] loading 'model' of")
    assert "2 mis-shaped: weight (4, 2) where the model has (5, 2), bias (4,) where the model has (5,)" in other_model
    assert other_load.startswith("MismatchedCheckpointError: [rank 0] loading ")
    assert no_file.startswith("CheckpointError: [rank 0] loading weights from ")


def test_training_goes_on_when_there_is_no_space(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What does not fit is told each time; the last good one stays until there is room."""
    results = launch(2, train_on_a_full_disk, tmp_path)
    assert [epoch for epoch, _ in results] == [4, 4]
    assert {tuple(entries) for _, entries in results} == {
        (".writer", "latest", "save-000001-step-0", "save-000002-step-0")
    }
    told = [line for line in capfd.readouterr().err.splitlines() if "no checkpoint was written" in line]
    assert len(told) == 2, told
    for line in told:
        assert (
            "File too large: 'model.safetensors'. Training continues; the last good checkpoint is save-000001" in line
        )
