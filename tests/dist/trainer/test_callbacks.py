# SPDX-License-Identifier: Apache-2.0
"""All callbacks in one fit on two real ranks that is killed and resumed: the contents of their files."""

from __future__ import annotations

import csv
import gc
import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import RankError, Trainer
from ddpilot.callbacks import (
    BestWeights,
    Callback,
    CsvLog,
    EarlyStopping,
    GarbageCollection,
    JsonLinesLog,
    LRMonitor,
    Norms,
    Pictures,
    Schedule,
    TensorBoardLog,
    Timers,
)
from ddpilot.checkpoint.weights import load_weights
from ddpilot.trainer.callbacks.performance import PARTS
from ddpilot.trainer.run import Run
from tests.dist.trainer.bodies import launcher

NUM_EPOCHS = 3
PER_EPOCH = 7
"""Updates: 53 samples in batches of 8."""
HAS_TENSORBOARD = find_spec("tensorboard") is not None


def make_data(num_samples: int = 53) -> TensorDataset:
    """Small pictures in two classes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 3, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def make_model() -> nn.Module:
    """With a weight in a different memory format, and a bool buffer."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        first = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        first.register_buffer("flag", torch.tensor([True, False]))
        return nn.Sequential(first, nn.Flatten(), nn.Tanh(), nn.Linear(16, 2)).double()


class Kill(Callback):
    """SIGKILL for rank 1 after an update."""

    ranks = "all"

    def __init__(self, update: int) -> None:
        self._update = update

    def on_update_end(self, run: Run) -> None:
        if run.update == self._update and run.loop.rank == run.loop.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Score(Callback):
    """A validation in which the ranks differ, as they must not: rank 0 sees its best in epoch 1."""

    ranks = "all"

    def on_evaluate_end(self, run: Run) -> None:
        run.metrics["val_score"] = (1.0, 2.0, 1.0, 1.0, 1.0)[run.epoch] if run.loop.rank == 0 else float(run.epoch)


class Facts(Callback):
    """What rank 0 saw of things that other callbacks do to all ranks."""

    ranks = "all"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_update_end(self, run: Run) -> None:
        mine = (run.update, gc.isenabled(), run.optimizer.param_groups[0]["weight_decay"])
        said = run.loop.group.all_gather_object(mine)
        assert said == [mine] * run.loop.world_size
        self.seen.append(mine)


def make_trainer(folder: Path, *more: Callback) -> tuple[Trainer, dict[str, Callback]]:
    """A trainer with all callbacks, which are given by name too."""
    callbacks: dict[str, Callback] = {
        "norms": Norms(every=1),
        "rates": LRMonitor(every=1),
        "timers": Timers(),
        "decay": Schedule("weight_decay", lambda update: 0.01 * update),
        "score": Score(),
        "csv": CsvLog(folder / "epochs.csv"),
        "json": JsonLinesLog(folder / "log.jsonl", every=1),
        "pictures": Pictures(make_data(), folder / "pictures", samples=[0, 1]),
        "best": BestWeights(folder / "best.safetensors", "val_score", mode="max"),
        "stopping": EarlyStopping("val_score", mode="max", patience=1, restore_best=True),
        "garbage": GarbageCollection(every=5),
        "facts": Facts(),
    }
    if HAS_TENSORBOARD:
        callbacks["tensorboard"] = TensorBoardLog(folder / "curves", every=1)
    trainer = Trainer(
        make_model(),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        callbacks=[*callbacks.values(), *more],
        launcher=launcher(),
    )
    return trainer, callbacks


def fit(trainer: Trainer, nproc_per_node: int, **options: Any) -> None:
    """Five epochs, of which the early stopping leaves three."""
    options = {"epochs": 5, "global_batch_size": 8, "nproc_per_node": nproc_per_node, **options}
    trainer.fit(make_data(), make_data(21), **options)


def curves(folder: Path) -> dict[str, list[int]]:
    """The steps of each of TensorBoard's curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [event.step for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def check_files(folder: Path, trainer: Trainer) -> None:
    """Each epoch once, each update once, and numbers as in the history."""
    updates = list(range(1, NUM_EPOCHS * PER_EPOCH + 1))
    with (folder / "epochs.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["epoch"] for row in table] == [str(number) for number in range(NUM_EPOCHS)]
    assert [float(row["val_loss"]) for row in table] == [row["val_loss"] for row in trainer.history.epochs]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["update"] for row in lines if row["row"] == "update"] == updates
    assert [row["epoch"] for row in lines if row["row"] == "epoch"] == list(range(NUM_EPOCHS))
    assert len(list(folder.glob("pictures/*.png"))) == NUM_EPOCHS
    assert all(imread(path).shape == (450, 800, 4) for path in folder.glob("pictures/*.png"))
    if HAS_TENSORBOARD:
        found = curves(folder / "curves")
        assert found["grad_norm"] == updates
        assert found["val_loss"] == updates[PER_EPOCH - 1 :: PER_EPOCH]
    assert {path.name for path in folder.iterdir()} - {"curves", "checkpoints"} == {
        *("epochs.csv", "log.jsonl", "pictures", "best.safetensors"),
    }


@pytest.mark.usefixtures("fonts_are_loaded")
def test_callbacks_run_together_on_two_ranks_through_a_kill(tmp_path: Path) -> None:
    """Killed in the middle of an epoch and resumed from a checkpoint: no row is lost or repeated, the same numbers."""
    alone, of_one = make_trainer(tmp_path / "one")
    fit(alone, 0)
    killed, _ = make_trainer(tmp_path / "two", Kill(PER_EPOCH + 3))
    kept = {"checkpoint_dir": tmp_path / "two" / "checkpoints"}
    with pytest.raises(RankError, match="SIGKILL"):
        fit(killed, 2, **kept)
    lines = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [row["update"] for row in lines if row["row"] == "update"] == list(range(1, PER_EPOCH + 4))
    resumed, of_two = make_trainer(tmp_path / "two")
    fit(resumed, 2, **kept)

    check_files(tmp_path / "one", alone)
    check_files(tmp_path / "two", resumed)
    for name in ("norms", "rates"):
        one, two = (vars(callbacks[name])["rows"] for callbacks in (of_one, of_two))
        assert len(two) == NUM_EPOCHS * PER_EPOCH
        for ours, theirs in zip(two, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
    facts = vars(of_two["facts"])["seen"]
    expected = [(number, False, pytest.approx(0.01 * number)) for number in range(1, NUM_EPOCHS * PER_EPOCH + 1)]
    assert facts == expected
    times = vars(of_two["timers"])["rows"]
    assert [row["epoch"] for row in times] == list(range(NUM_EPOCHS))
    assert all(len(row[part]) == 2 for row in times for part in PARTS)
    assert times[1]["save"] == [0, 0]  # these ranks have made none before
    assert min(times[2]["save"]) > 0
    assert of_two["stopping"].state_dict()["best_epoch"] == 1
    best, model = make_model(), resumed.model
    load_weights(best, tmp_path / "two" / "best.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), model.parameters(), strict=True))
