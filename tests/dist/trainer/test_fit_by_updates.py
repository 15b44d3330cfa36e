# SPDX-License-Identifier: Apache-2.0
"""An endless stream, counted in updates, has the numbers of plain PyTorch at any number of ranks, also when killed."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import ddpilot
from tests.dist.trainer.bodies import CLIP_NORM, distance, launcher, make_data, make_model, make_optimizer
from tests.soak import often

same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)

BATCH_SIZE, ACCUMULATE = 5, 2
NUM_UPDATES, EVERY, STEP_EVERY = 11, 4, 3
SAMPLES = make_data(97)
OPTIONS: dict[str, Any] = {
    "max_updates": NUM_UPDATES,
    "validate_every": EVERY,
    "global_batch_size": BATCH_SIZE,
    "progress": False,
}


class Endless(IterableDataset[Any]):
    """The samples again and again."""

    def __iter__(self) -> Iterator[Any]:
        return (SAMPLES[number % len(SAMPLES)] for number in itertools.count())


class KillAt(ddpilot.Callback):
    """Kills one rank after an update, once."""

    ranks = "all"

    def __init__(self, update: int, flag: Path) -> None:
        self._update, self._flag = update, flag

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self._update and run.loop.rank == 1 and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(**options: Any) -> ddpilot.Trainer:
    """With a schedule that steps every few updates."""
    return ddpilot.Trainer(
        make_model(),
        nn.functional.mse_loss,
        make_optimizer,
        metrics={"distance": distance},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
        scheduler_per=f"{STEP_EVERY} updates",
        clip_norm=CLIP_NORM,
        accumulate=ACCUMULATE,
        launcher=launcher(),
        **options,
    )


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The same in plain PyTorch: rows, losses and weights."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    x_val, y_val = make_data(21, first=60).tensors
    losses: list[float] = []
    rows: list[dict[str, Any]] = []
    size = BATCH_SIZE * ACCUMULATE
    for update in range(1, NUM_UPDATES + 1):
        numbers = [number % len(SAMPLES) for number in range((update - 1) * size, update * size)]
        x, y = SAMPLES[numbers]
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if update % STEP_EVERY == 0:
            scheduler.step()
        if update % EVERY == 0 or update == NUM_UPDATES:
            part = losses[rows[-1]["update"] if rows else 0 :]
            with torch.no_grad():
                output = model(x_val)
            rows.append({"epoch": 0, "update": update, "loss": sum(part) / len(part), "samples": size * len(part)})
            rows[-1] |= {"lr": scheduler.get_last_lr()[0], "val_loss": nn.functional.mse_loss(output, y_val).item()}
            rows[-1] |= {"val_distance": distance(output, y_val).mean().item()}
    return {"rows": rows, "losses": losses, "weights": model.state_dict()}


def check(trainer: ddpilot.Trainer, plain: dict[str, Any]) -> None:
    """Rows of intervals and updates, and weights."""
    names = plain["rows"][0]
    found = [{name: row[name] for name in names} for row in trainer.history.intervals]
    assert found == [pytest.approx(row, rel=1e-10) for row in plain["rows"]]
    assert [row["loss"] for row in trainer.history.updates] == pytest.approx(plain["losses"], rel=1e-10)
    assert [(row["update"], row["samples"]) for row in trainer.history.epochs] == [(NUM_UPDATES, 110)]
    same(trainer.model.state_dict(), plain["weights"])


@pytest.mark.timeout(100)
@often("3")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_endless_stream_has_the_numbers_of_a_plain_loop(num_ranks: int, plain: dict[str, Any]) -> None:
    """Losses, learning rates, validations and weights, by updates."""
    trainer = make_trainer()
    trainer.fit(Endless(), make_data(21, first=60), nproc_per_node=num_ranks, **OPTIONS)
    check(trainer, plain)


class StopAt(ddpilot.Callback):
    """Stops on rank 0 alone, after an interval."""

    def on_interval_end(self, run: ddpilot.Run) -> None:
        if run.update == 2 * EVERY:
            run.stop()


@pytest.mark.timeout(100)
def test_a_stop_of_rank_zero_after_an_interval_is_exact_and_continues(plain: dict[str, Any]) -> None:
    """No update more, on any rank; the next fit, at another number of ranks, ends with the same weights."""
    trainer = make_trainer(callbacks=[StopAt()])
    trainer.fit(Endless(), make_data(21, first=60), nproc_per_node=3, **OPTIONS)
    assert (trainer.position.num_updates, trainer.position.next_batch) == (2 * EVERY, 2 * EVERY * ACCUMULATE)
    trainer.callbacks.clear()
    trainer.fit(Endless(), make_data(21, first=60), nproc_per_node=2, **OPTIONS)
    assert [row["update"] for row in trainer.history.intervals] == [row["update"] for row in plain["rows"]]
    same(trainer.model.state_dict(), plain["weights"])


@pytest.mark.timeout(100)
@often("8")
@pytest.mark.parametrize("update", [6, 8])
def test_a_killed_fit_resumes_at_another_number_of_ranks(update: int, plain: dict[str, Any], tmp_path: Path) -> None:
    """Within an interval, and at its end before its validation: the history has no hole."""
    options = {**OPTIONS, "checkpoint_dir": tmp_path / "ckpt", "save_every": 5}
    with pytest.raises(ddpilot.RankError, match="rank 1 was killed by SIGKILL"):
        make_trainer(callbacks=[KillAt(update, tmp_path / "flag")]).fit(
            Endless(), make_data(21, first=60), nproc_per_node=3, **options
        )
    trainer = make_trainer()
    trainer.fit(Endless(), make_data(21, first=60), nproc_per_node=2, **options)
    check(trainer, plain)


@pytest.mark.timeout(100)
def test_dry_run_on_ranks_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With divided optimizer state, too; the checkpoint is written next to where it would be, and removed."""
    trainer = make_trainer()
    options = {**OPTIONS, "checkpoint_dir": tmp_path / "ckpt", "ddp": {"shard": "optimizer"}}
    trainer.fit(Endless(), make_data(21, first=60), nproc_per_node=2, dry_run=True, **options)
    assert "dry run: 2 updates, a validation, a save and a load in" in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert (trainer.position.num_updates, trainer.history.updates) == (0, [])
    same(trainer.model.state_dict(), make_model().state_dict())
