# SPDX-License-Identifier: Apache-2.0
"""A fit in this process: early ends, validation, and what is kept."""

from __future__ import annotations

import copy
import errno
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ddpilot
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import LoopError
from ddpilot.group.protocol import FakeGroup
from ddpilot.trainer.callbacks.best_epoch import BestWeights, EarlyStopping

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    """The same samples as a stream of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Faulty(nn.Linear):
    """Fails in one of its forward passes."""

    calls_left = 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ArithmeticError("a bad sample")
        return super().forward(x)


class StopAt(ddpilot.Callback):
    """Stops with the update after this one."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self.last:
            run.stop()


class Lonely(ddpilot.Callback):
    """Runs on rank 0 only, and calls a collective."""

    def __init__(self, of_group: bool) -> None:
        self.of_group = of_group

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        assert run.loop.world_size == run.loop.group.world_size == 1
        if self.of_group:
            run.loop.group.barrier()
        else:
            run.loop.reduce(1.0)


def make_trainer(kind: type[ddpilot.Trainer] = ddpilot.Trainer, **options: Any) -> Any:
    """With state in the optimizer and in a scheduler."""
    return kind(
        Faulty(2, 1).double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ema=0.9,
        **options,
    )


def fit(trainer: ddpilot.Trainer, data: Any = DATA, **options: Any) -> ddpilot.History:
    """Three updates in an epoch."""
    return trainer.fit(data, DATA, global_batch_size=4, nproc_per_node=0, progress=False, **options)


def state_of(trainer: ddpilot.Trainer) -> Any:
    """All that a fit changes."""
    things = [trainer.model, trainer.ema, *trainer.optimizers.values(), *trainer.schedulers.values()]
    return copy.deepcopy([thing.state_dict() for thing in things])


def test_fit_in_this_process_leaves_all_as_it_was_when_it_fails() -> None:
    """As with ranks, which train copies; the next fit starts from the restored state."""
    trainer, other = make_trainer(), make_trainer()
    other.model.load_state_dict(trainer.model.state_dict())
    for each in (trainer, other):
        fit(each)
    before, position, history = state_of(trainer), trainer.position, copy.deepcopy(trainer.history)
    assert isinstance(trainer.model, Faulty)
    trainer.model.calls_left = 5
    with pytest.raises(ArithmeticError, match="a bad sample"):
        fit(trainer, epochs=2)
    torch.testing.assert_close(state_of(trainer), before, rtol=0, atol=0)
    assert (trainer.position, trainer.history) == (position, history)
    assert trainer.model.weight.grad is None
    trainer.model.calls_left = 100
    for each in (trainer, other):
        fit(each)
    torch.testing.assert_close(trainer.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["dataset", "stream"])
def test_a_stop_after_the_last_batch_leaves_no_part_without_samples(data: Any) -> None:
    """With a dataset the epoch is complete; the end of a stream is found by the next fit, which completes the row."""
    trainer = make_trainer(callbacks=[StopAt(2)])
    fit(trainer, data, epochs=4)
    row = trainer.history.epochs[-1]
    assert (row["update"], row["samples"], "val_loss" in row) == (3, 12, data is DATA)
    trainer.callbacks.clear()
    fit(trainer, data, epochs=1)
    rows = [
        (row["epoch"], row["update"], row["samples"], row["loss"] > 0, row["val_loss"] > 0)
        for row in trainer.history.epochs
    ]
    assert rows == [(0, 3, 12, True, True), (1, 6, 12, True, True)][: 2 if data is DATA else 1]


def test_a_part_of_an_epoch_skipped_for_different_data_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """With the batch size that changed; the history counts the epoch once."""
    trainer = make_trainer(callbacks=[StopAt(4)])
    fit(trainer, epochs=4)
    assert trainer.position.next_batch
    capsys.readouterr()
    trainer.fit(DATA, epochs=1, global_batch_size=6, nproc_per_node=0, progress=False)
    reason = "as the training data changed (global_batch_size 4 -> 6)"
    assert f"skipping the rest of epoch 1 (from batch 2), {reason}: starting epoch 2" in capsys.readouterr().out
    assert [row["epoch"] for row in trainer.history.epochs] == [0, 1, 2]


def test_a_history_of_an_epoch_in_parts_counts_it_once() -> None:
    """It has a row for each part."""
    trainer = make_trainer(callbacks=[StopAt(1)])
    fit(trainer)
    fit(trainer)
    assert len(trainer.history.epochs) == 2
    assert repr(trainer.history).startswith("History(1 epoch, 3 updates")


@pytest.mark.parametrize("stop_after", [1, 4])
def test_an_epoch_resumed_from_a_checkpoint_has_all_of_its_losses(stop_after: int, tmp_path: Path) -> None:
    """One row for the epoch, over all of its samples, and one for each update."""
    first, second, whole = make_trainer(callbacks=[StopAt(stop_after)]), make_trainer(), make_trainer()
    for each in (second, whole):
        each.model.load_state_dict(first.model.state_dict())
    fit(first, until_epoch=3, checkpoint_dir=tmp_path)
    assert first.position.next_batch
    fit(second, until_epoch=3, checkpoint_dir=tmp_path)
    fit(whole, until_epoch=3)
    assert second.history.updates == [pytest.approx(row, rel=1e-12) for row in whole.history.updates]
    for name in ("epoch", "update", "loss", "val_loss", "samples"):
        assert [row[name] for row in second.history.epochs] == pytest.approx(
            [row[name] for row in whole.history.epochs], rel=1e-12
        )


class FailsAtTheEnd(ddpilot.Callback):
    """Fails to write its file after the last update."""

    def __init__(self, event: str) -> None:
        self.event = event

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        self._fail("epoch", run)

    def on_fit_end(self, run: ddpilot.Run) -> None:
        self._fail("fit", run)

    def _fail(self, event: str, run: ddpilot.Run) -> None:
        if self.event == event and run.epoch >= 1:
            raise OSError(errno.ENOSPC, "No space left on device", "picture.png")


@pytest.mark.parametrize("event", ["epoch", "fit"])
def test_what_fails_once_training_is_over_is_raised_and_loses_nothing(event: str) -> None:
    """After the last update, in the last epoch or at the end of the fit; weights, history and place are kept."""
    trainer, whole = make_trainer(callbacks=[FailsAtTheEnd(event)]), make_trainer()
    whole.model.load_state_dict(trainer.model.state_dict())
    with pytest.raises(OSError, match="No space left on device"):
        fit(trainer, epochs=2)
    fit(whole, epochs=2)
    torch.testing.assert_close(state_of(trainer), state_of(whole), rtol=0, atol=0)
    assert [row["loss"] for row in trainer.history.epochs] == [row["loss"] for row in whole.history.epochs]
    assert trainer.position == whole.position


@pytest.mark.parametrize(("of_group", "name"), [(False, "run.loop.reduce"), (True, "run.loop.group.barrier")])
def test_a_callback_of_rank_zero_cannot_call_for_all_ranks(of_group: bool, name: str) -> None:
    """With several ranks it would wait for ever: it is refused with one, too."""
    with pytest.raises(ddpilot.LoopError, match=f"calling {name} in Lonely: `ranks` is 'zero'"):
        fit(make_trainer(callbacks=[Lonely(of_group)]))


class Changing(ddpilot.Trainer):
    """Has losses of other names in every second batch, a number among them."""

    returned: Any = None

    def train_batch(self, run: ddpilot.Run, batch: Any) -> Any:
        loss = super().train_batch(run, batch)
        if self.returned is not None:
            return self.returned
        assert run.loop.batch is not None
        return {"loss": loss, "extra": 2.0 * run.loop.batch.index} if run.loop.batch.index % 2 else {"loss": loss}


def test_a_step_may_return_losses_of_other_names_in_each_batch() -> None:
    """Each is a mean over the batches that had it; a row without it has NaN. What is no number is named at once."""
    plain, changing = make_trainer(), make_trainer(kind=Changing)
    changing.model.load_state_dict(plain.model.state_dict())
    for trainer in (plain, changing):
        fit(trainer)
    assert [row["loss"] for row in changing.history.updates] == [row["loss"] for row in plain.history.updates]
    extra = [row["extra"] for row in changing.history.updates]
    assert [index for index, value in enumerate(extra) if not math.isnan(value)] == [*range(1, len(extra), 2)]
    assert changing.history.epochs[0]["loss"] == plain.history.epochs[0]["loss"]
    given = [2.0 * index for index in range(1, len(extra), 2)]
    assert min(given) <= changing.history.epochs[0]["extra"] <= max(given)
    for returned, said in ((torch.ones(2), r"a tensor of shape \(2,\) as 'loss'"), ({"a": None}, "None as 'a'")):
        changing.returned = returned
        with pytest.raises(ddpilot.LoopError, match=f"recording a loss: `train_batch` returned {said}"):
            fit(changing)


def test_evaluations_have_the_batch_size_of_the_last_fit() -> None:
    """The global one, also if the batch size per rank or a DataLoader was given."""
    trainer = make_trainer()
    assert trainer.batch_size == 64
    trainer.fit(DATA, batch_size_per_rank=3, nproc_per_node=0, progress=False)
    assert trainer.batch_size == 3
    trainer.fit(DataLoader(DATA, batch_size=2), nproc_per_node=0, progress=False)
    assert trainer.batch_size == 2


def test_a_fit_that_failed_lets_other_processes_write_its_checkpoints(tmp_path: Path) -> None:
    """Also while its traceback is kept, as a notebook keeps it: the next fit may be on ranks."""
    code = "import sys; from pathlib import Path; from ddpilot.checkpoint.write_lock import Writer; "
    command = [sys.executable, "-c", code + "Writer.of(Path(sys.argv[1]))", str(tmp_path)]
    fit(make_trainer(), checkpoint_dir=tmp_path)
    with pytest.raises(ddpilot.CheckpointError, match="`seed` was 0, is 1") as kept:
        fit(make_trainer(seed=1), checkpoint_dir=tmp_path)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert kept.tb is not None


def make_plain(*callbacks: ddpilot.Callback, maximize: bool = False, **options: Any) -> ddpilot.Trainer:
    """A linear model in float64."""
    return ddpilot.Trainer(
        nn.Linear(2, 1).double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, maximize=maximize),
        callbacks=callbacks,
        **options,
    )


def validated(trainer: ddpilot.Trainer, **options: Any) -> list[int]:
    """Train in this process; return the epochs of all fits that were validated."""
    options = {"global_batch_size": 5, "nproc_per_node": 0, "progress": False, **options}
    history = trainer.fit(DATA, DATA, **options)
    return [row["epoch"] for row in history.epochs if "val_loss" in row]


def test_every_kth_epoch_over_all_fits_and_the_last_of_each_is_validated() -> None:
    """Counted from the first epoch of the training, so that a fit in two parts validates the same epochs."""
    trainer = make_plain()
    assert validated(trainer, epochs=7, validate_every=3) == [2, 5, 6]
    assert validated(trainer, epochs=3, validate_every=3) == [2, 5, 6, 8, 9]


def test_monitors_of_a_validation_metric_read_validated_epochs_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best weights, the best checkpoint and early stopping skip the other epochs, without a warning."""
    best, stopping = BestWeights(tmp_path / "best.safetensors"), EarlyStopping("val_loss", patience=2)
    options = {"checkpoint_dir": tmp_path / "ckpt", "checkpoints": {"best": "min val_loss"}}
    assert validated(make_plain(best, stopping, maximize=True), epochs=20, validate_every=2, **options) == [1, 3, 5]
    chosen = CheckpointDir(tmp_path / "ckpt", best="min val_loss").best()
    assert best.best_epoch == stopping.best_epoch == 1
    assert chosen is not None
    assert chosen.manifest.metrics["val_loss"] == best.best
    assert "there is no best" not in capsys.readouterr().err


def test_a_plateau_scheduler_steps_with_validations_only() -> None:
    """It does not get the training loss in between."""
    trainer = make_plain(scheduler=lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=9))
    validated(trainer, epochs=5, validate_every=2)
    assert trainer.schedulers["optimizer"].last_epoch == 3


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_validate_every_is_a_number_of_epochs(every: Any) -> None:
    """Other values are rejected before training."""
    with pytest.raises(LoopError, match="`validate_every` is"):
        validated(make_plain(), validate_every=every)


def test_explain_renders_the_choices_of_the_last_fit() -> None:
    """Raises before the first fit."""
    trainer = make_plain()
    with pytest.raises(LoopError, match="no fit has ended yet"):
        trainer.explain()
    validated(trainer)
    assert "Linear: not wrapped in DDP, as world_size is 1" in str(trainer.explain())


class Small(ddpilot.Trainer):
    """Its step also reads data with batches too small for a BatchNorm on two ranks."""

    def train_batch(self, run: ddpilot.Run, batch: object) -> torch.Tensor:
        """Cause the finding inside of `Trainer.fit`."""
        del run, batch
        loop = ddpilot.Loop(group=FakeGroup(world_size=2))
        loop.prepare(nn.BatchNorm1d(2))
        next(iter(loop.batches(loop.loader(ONES, global_batch_size=4))))
        return torch.zeros(())


ONES = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))


def test_a_finding_names_the_users_line() -> None:
    """With frames of ddpilot above and below it."""
    trainer = Small(nn.Linear(2, 1), None, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.warns(UserWarning, match="DDP501") as caught:
        trainer.fit(ONES, global_batch_size=4, nproc_per_node=0, progress=False)
    assert [one.filename for one in caught if "DDP501" in str(one.message)] == [__file__]
