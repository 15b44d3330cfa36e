# SPDX-License-Identifier: Apache-2.0
"""A fit counted in updates: an endless stream is validated, recorded, stopped and resumed."""

from __future__ import annotations

import copy
import itertools
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset

import ddpilot
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.errors import CheckpointError, LoopError
from ddpilot.trainer.callbacks.best_epoch import BestWeights, EarlyStopping
from ddpilot.trainer.callbacks.logs import CsvLog, JsonLinesLog
from ddpilot.trainer.callbacks.performance import Timers
from ddpilot.training.options import Interval

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
BATCH = 4


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample of the stream."""
    x = torch.tensor([math.sin(number), math.cos(3 * number)], dtype=torch.float64)
    return x, x.sum(0, keepdim=True)


class Endless(IterableDataset[Any]):
    """Without a length and without an end."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(number) for number in itertools.count())


class Once(IterableDataset[Any]):
    """Can be read once, as a generator."""

    def __init__(self) -> None:
        self._items = iter(DATA)

    def __iter__(self) -> Iterator[Any]:
        return self._items


class KilledError(Exception):
    """Ends a fit as a kill would, but for the process."""


class KillAt(ddpilot.Callback):
    """Raises after one of the updates."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self._update:
            raise KilledError

    def state_dict(self) -> dict[str, Any]:
        return {}


class Validations(ddpilot.Callback):
    """Records where it was called, and may stop there."""

    def __init__(self, stop_at: int = -1) -> None:
        self.seen: list[tuple[str, int]] = []
        self._stop_at = stop_at

    def on_evaluate_end(self, run: ddpilot.Run) -> None:
        self.seen.append(("evaluate", run.update))

    def on_interval_end(self, run: ddpilot.Run) -> None:
        assert run.history.intervals[-1] is run.metrics
        self.seen.append(("interval", run.update))
        if run.update == self._stop_at:
            run.stop()

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        self.seen.append(("epoch", run.update))


def make(*callbacks: ddpilot.Callback, **options: Any) -> ddpilot.Trainer:
    """The same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        model = nn.Linear(2, 1).double()
    return ddpilot.Trainer(
        model,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        callbacks=callbacks,
        **options,
    )


def fit(trainer: ddpilot.Trainer, data: Any = None, **options: Any) -> ddpilot.History:
    """In this process."""
    given = {"global_batch_size": BATCH, "nproc_per_node": 0, "progress": False, **options}
    return trainer.fit(Endless() if data is None else data, DATA, **given)


def plainly(num_updates: int, every: int, step_every: int = 1) -> dict[str, Any]:
    """The endless stream in plain PyTorch."""
    model = make().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses: list[float] = []
    rows: list[dict[str, Any]] = []
    for update in range(1, num_updates + 1):
        samples = [sample(number) for number in range((update - 1) * BATCH, update * BATCH)]
        x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if update % step_every == 0:
            scheduler.step()
        if update % every == 0 or update == num_updates:
            part = losses[rows[-1]["update"] if rows else 0 :]
            with torch.no_grad():
                val_loss = nn.functional.mse_loss(model(X), X.sum(1, keepdim=True)).item()
            rows.append({"epoch": 0, "update": update, "loss": sum(part) / len(part), "val_loss": val_loss})
            rows[-1] |= {"lr": scheduler.get_last_lr()[0], "samples": BATCH * len(part)}
    return {"rows": rows, "losses": losses, "weights": model.state_dict()}


def approximately(rows: list[dict[str, Any]]) -> list[Any]:
    """What rows of a history are compared with, without what a clock measured."""
    return [pytest.approx(row, rel=1e-10, nan_ok=True) for row in untimed(rows)]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a clock measured."""
    return [{name: row[name] for name in row if name not in ("seconds", "samples_per_s", "data_wait")} for row in rows]


@pytest.mark.parametrize("step_every", [1, 3])
def test_an_endless_stream_has_the_numbers_of_a_plain_loop(step_every: int) -> None:
    """Losses, weights, validations and learning rates; a last, shorter interval ends with the fit."""
    trainer = make(
        scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
        scheduler_per="update" if step_every == 1 else f"{step_every} updates",
    )
    history, plain = fit(trainer, max_updates=11, validate_every=4), plainly(11, 4, step_every)
    assert untimed(history.intervals) == approximately(plain["rows"])
    assert [row["loss"] for row in history.updates] == pytest.approx(plain["losses"], rel=1e-12)
    torch.testing.assert_close(trainer.model.state_dict(), plain["weights"], rtol=1e-12, atol=0)
    assert [(row["update"], row["samples"], "val_loss" in row) for row in history.epochs] == [(11, 44, False)]
    assert repr(history).startswith("History(1 epoch, 11 updates; last: loss=")
    assert history.rows is history.intervals


def test_the_order_of_events_in_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """The validation, then the interval; both within the epoch, and before it where they end together."""
    seen = Validations()
    fit(make(seen), DATA, max_updates=7, validate_every=3, progress=None)
    interval = [(3, "evaluate"), (3, "interval"), (3, "epoch"), (6, "evaluate"), (6, "interval"), (6, "epoch")]
    assert [(update, name) for name, update in seen.seen] == [*interval, (7, "evaluate"), (7, "interval"), (7, "epoch")]
    output = capsys.readouterr().out
    assert "update 3 of 7 (epoch 0): loss" in output
    assert "epoch 1: loss" in output
    assert "stopped" not in output


@pytest.mark.parametrize(("data", "every"), [(DATA, "5 updates"), (None, "4 updates")], ids=["dataset", "stream"])
def test_a_fit_killed_at_any_update_resumes_with_the_same_history(data: Any, every: str, tmp_path: Path) -> None:
    """Weights and rows; intervals begin in one epoch and end in the next."""
    whole = make()
    expected = fit(whole, data, max_updates=10, validate_every=every)
    for update in range(1, 11):
        folder = tmp_path / str(update)
        given = {"max_updates": 10, "validate_every": every, "checkpoint_dir": folder, "save_every": 4}
        with pytest.raises(KilledError):
            fit(make(KillAt(update)), data, **given)
        again = make()
        history = fit(again, data, **given)
        torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        for name in ("intervals", "epochs", "updates"):
            assert untimed(getattr(history, name)) == approximately(getattr(expected, name)), name
    # All is done: once more changes nothing.
    third = make()
    assert fit(third, data, **given).intervals == history.intervals
    torch.testing.assert_close(third.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


class InterruptAt(ddpilot.Callback):
    """Sends SIGINT after one of the updates, as the stop button does."""

    ranks = "all"

    def __init__(self, update: int) -> None:
        self._update = update

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self._update:
            signal.raise_signal(signal.SIGINT)
            run.loop.exchange_stop()


@pytest.mark.parametrize("every", ["4 updates", "2 epochs"])
def test_a_signal_validates_nothing_that_is_not_due(every: str, tmp_path: Path) -> None:
    """Also at the end of an epoch: a ReduceLROnPlateau makes the steps of a fit without signals."""
    options = {"scheduler": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0, threshold=0.9)}
    whole = make(**options)
    expected = fit(whole, DATA, max_updates=10, validate_every=every)
    for update in range(1, 10):
        given = {"max_updates": 10, "validate_every": every, "checkpoint_dir": tmp_path / str(update)}
        first, again = make(InterruptAt(update), **options), make(**options)
        part = fit(first, DATA, **given)
        assert first.position.num_updates == update
        history = fit(again, DATA, **given)
        torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        for name in ("intervals", "epochs"):
            assert untimed(getattr(history, name)) == approximately(getattr(expected, name)), name
        rows = part.intervals if "updates" in every else part.epochs
        assert sum(row["samples"] for row in rows) == update * BATCH


def test_epochs_may_be_validated_by_updates_and_updates_by_epochs() -> None:
    """The unit of the interval is independent of the fit's; the end of the fit is always validated."""
    by_updates = fit(make(), DATA, epochs=3, validate_every="4 updates")
    assert [(row["epoch"], row["update"]) for row in by_updates.intervals] == [(1, 4), (2, 8), (2, 9)]
    assert [("val_loss" in row, row["samples"]) for row in by_updates.epochs] == [(False, 12)] * 3
    by_epochs = fit(make(), DATA, max_updates=7, validate_every="2 epochs")
    assert [(row["update"], "val_loss" in row) for row in by_epochs.epochs] == [(3, False), (6, True), (7, True)]
    assert by_epochs.intervals == []
    assert by_epochs.epochs[1]["val_loss"] == pytest.approx(fit(make(), DATA, epochs=2).epochs[1]["val_loss"])


def test_a_learning_rate_is_found_without_the_callbacks() -> None:
    """What they monitor needs no validation set here."""
    data = TensorDataset(torch.ones(8, 2).double(), torch.ones(8, 1).double())
    trainer = make(EarlyStopping("val_loss"))
    assert trainer.find_learning_rate(data, global_batch_size=4, min_lr=1e-3, num_updates=30, nproc_per_node=0).lr > 0
    with pytest.raises(LoopError, match="EarlyStopping monitors 'val_loss'"):
        trainer.fit(data, global_batch_size=4, nproc_per_node=0)


def test_a_validation_set_needs_a_batch_size_where_batches_have_any() -> None:
    """A batch_sampler has no batch size that the validation could have."""
    batches = DataLoader(DATA, batch_sampler=[[0, 1, 2], [3], [4, 5]])
    with pytest.raises(LoopError, match="a TensorDataset as `val_set`, and a DataLoader of batches of any size"):
        fit(make(), batches, global_batch_size=None)
    assert (
        make().fit(batches, DataLoader(DATA, batch_size=4), nproc_per_node=0, progress=False).epochs[0]["update"] == 3
    )


def test_a_stop_at_an_interval_takes_effect_after_its_update(tmp_path: Path) -> None:
    """On rank 0 is enough. A larger total goes on from there, and so does the same call in a new trainer."""
    options = {"scheduler": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9)}
    trainer = make(Validations(stop_at=4), **options)
    given = {"max_updates": 9, "validate_every": 2, "checkpoint_dir": tmp_path}
    fit(trainer, **given)
    assert trainer.position.num_updates == 4
    again = make(**options)
    fit(again, **given)
    torch.testing.assert_close(again.model.state_dict(), plainly(9, 2)["weights"], rtol=1e-12, atol=0)
    assert [row["update"] for row in again.history.intervals] == [2, 4, 6, 8, 9]
    assert [row["update"] for row in again.history.epochs] == [4, 9]


class Scores(ddpilot.Callback):
    """Replaces the validation loss."""

    ranks = "all"

    def __init__(self, *values: float) -> None:
        self._values = values

    def on_evaluate_end(self, run: ddpilot.Run) -> None:
        run.metrics["val_loss"] = self._values[run.update // 2 - 1]


def test_early_stopping_and_best_count_intervals(tmp_path: Path) -> None:
    """The stop is right after the interval that decides it, and is remembered; the best checkpoint is that of one."""
    given = {"max_updates": 20, "validate_every": 2, "checkpoint_dir": tmp_path / "ckpt"}
    values = (5.0, 3.0, 4.0, 4.0, 1.0)

    def run_again(**options: Any) -> tuple[EarlyStopping, BestWeights, ddpilot.Trainer]:
        stopping, best = EarlyStopping(patience=2), BestWeights(tmp_path / "best.safetensors")
        trainer = make(Scores(*values, *[9.0] * 9), stopping, best)
        fit(trainer, checkpoints={"best": "min val_loss", "keep": 1}, **{**given, **options})
        return stopping, best, trainer

    for _ in range(2):
        stopping, best, trainer = run_again()
        assert trainer.position.num_updates == 8
        assert (stopping.best, stopping.best_update, best.best_update) == (3.0, 4, 4)
        assert "val_loss was not better than 3.0 of update 4 for 2 validations" in stopping.stopped
    chosen = CheckpointDir(tmp_path / "ckpt", best="min val_loss").best()
    assert chosen is not None
    assert (chosen.manifest.progress.step, chosen.manifest.metrics["val_loss"]) == (4, 3.0)
    assert run_again(max_updates=30)[0].best_update == 10


def test_a_plateau_scheduler_steps_with_each_interval() -> None:
    """By its validation loss."""
    trainer = make(scheduler=lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=99))
    history = fit(trainer, max_updates=9, validate_every=2)
    scheduler = trainer.schedulers["optimizer"]
    assert (scheduler.last_epoch, scheduler.best) == (5, min(row["val_loss"] for row in history.intervals))


def test_logs_and_timers_have_a_row_for_each_interval(tmp_path: Path) -> None:
    """Also after a resume, which repeats none."""
    timers = Timers(say=False)
    logs = [CsvLog(tmp_path / "log.csv"), JsonLinesLog(tmp_path / "log.jsonl", every=100), timers]
    trainer = make(*logs)
    for total in (5, 9):
        fit(trainer, max_updates=total, validate_every=2)
    updates = [2, 4, 5, 6, 8, 9]
    assert [row["update"] for row in trainer.history.intervals] == updates
    table = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in table] == [["epoch", "update"], *[["0", str(one)] for one in updates]]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if row["row"] == "interval"] == updates
    assert [row["number"] for row in timers.rows] == updates
    assert trainer.history.to_csv(tmp_path / "history.csv").read_text().count("\n") == 1 + len(updates)


def test_with_a_checkpoint_directory_epochs_are_a_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a new trainer and in the same one; without a directory they are further epochs, as they were."""
    for trainer in (make(), make()):
        for epochs in (2, 3, 3):
            fit(trainer, DATA, epochs=epochs, checkpoint_dir=tmp_path)
        assert trainer.position.epoch == 3
    output = capsys.readouterr().out
    assert "nothing to train: 3 of 3 epochs are done already; with a `checkpoint_dir` `epochs` is a total: ep" in output
    fit(trainer, DATA, epochs=2)
    assert trainer.position.epoch == 5
    fit(trainer, DATA, max_updates=15)
    assert "nothing to train: 15 of 15 updates are done already\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_updates": 5, "epochs": 1}, "`epochs=1`, a number of further epochs, and `max_updates=5`, a total of up"),
        ({"max_updates": -5}, "`max_updates` is -5. Give a whole number of updates"),
        ({"max_updates": 5, "validate_every": "500 steps"}, '`validate_every` is .* Did you mean "500 updates"'),
        ({"validate_every": "2"}, '`validate_every` is .* Did you mean "2 epochs"'),
        ({"save_every": 0, "checkpoint_dir": "unused"}, "`save_every` is 0. Give a number of updates"),
        ({"save_every": 5}, "`checkpoints` with 'save_every', and no `checkpoint_dir`"),
    ],
)
def test_fit_rejects_other_counts(options: dict[str, Any], message: str) -> None:
    """Before training, with the right spelling."""
    with pytest.raises(LoopError, match=message):
        fit(make(), DATA, **options)


def test_a_stream_that_is_read_once_does_not_train_for_ever() -> None:
    """The second epoch has no samples, so that the number of updates is never reached."""
    with pytest.raises(LoopError, match="no samples were read in epoch 1"):
        fit(make(), Once(), max_updates=50)


def test_run_says_what_a_fit_counts() -> None:
    """None for what it does not count."""
    seen: list[Any] = []

    class Look(ddpilot.Callback):
        def on_fit_start(self, run: ddpilot.Run) -> None:
            seen.append((run.num_epochs, run.until_epoch, run.max_updates, run.validate_every))

    fit(make(Look()), max_updates=1, validate_every=5)
    fit(make(Look()), DATA, epochs=1)
    assert seen == [(None, None, 1, Interval(5, "updates")), (1, None, None, Interval(1, "epochs"))]


def losses_of(data: Any, **options: Any) -> tuple[list[float], list[int], float]:
    """Losses of updates, samples of epochs, and the last validation."""
    history = fit(make(accumulate=2), data, **options)
    rows = history.epochs
    return [row["loss"] for row in history.updates], [row["samples"] for row in rows], rows[-1]["val_loss"]


@pytest.mark.parametrize("data", [DATA, None], ids=["dataset", "stream"])
def test_limit_batches_gives_the_numbers_of_shorter_data(data: Any) -> None:
    """Of a dataset with only these samples; the last, short accumulation group too."""
    first = [sample(number) for number in range(3 * BATCH)] if data is None else DATA
    shorter = torch.utils.data.Subset(first, range(2 * BATCH + 4 * (data is None)))  # type: ignore[arg-type]
    limit = 3 if data is None else 2
    limited = losses_of(data, epochs=2, shuffle=False, limit_batches={"train": limit})
    for one, other in zip(limited, losses_of(shorter, epochs=2, shuffle=False), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert limited[1] == [limit * BATCH] * 2


def test_limit_batches_limits_the_validation_too() -> None:
    """To its first batches."""
    trainer = make()
    history = fit(trainer, DATA, epochs=1, limit_batches=1)
    expected = nn.functional.mse_loss(trainer.model(X[:BATCH]), X[:BATCH].sum(1, keepdim=True)).item()
    assert history.epochs[0]["val_loss"] == pytest.approx(expected, rel=1e-12)
    assert (history.epochs[0]["samples"], history.epochs[0]["update"]) == (BATCH, 1)
    with pytest.raises(LoopError, match="`limit_batches` has no 'val'"):
        fit(trainer, DATA, limit_batches={"val": 1})
    with pytest.raises(LoopError, match="`limit_batches` of train is 0"):
        fit(trainer, DATA, limit_batches=0)


class Counting(nn.Linear):
    """Counts its forward passes in training and in evaluation."""

    calls: ClassVar[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, 2)."""
        self.calls.append(self.training)
        return super().forward(x)


@pytest.mark.parametrize("data", [ConcatDataset([DATA, DATA]), None], ids=["dataset", "stream"])
def test_dry_run_tries_everything_and_leaves_nothing(
    data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two updates of accumulated batches, two batches of validation, before and after a fit, which trains the same."""
    Counting.calls.clear()
    options: dict[str, Any] = {"scheduler": lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9), "ema": 0.9}
    models = [Counting(2, 1).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    trainer, other = (
        ddpilot.Trainer(model, nn.functional.mse_loss, torch.optim.AdamW, accumulate=2, **options) for model in models
    )
    given = {"max_updates": 5, "validate_every": 2, "checkpoint_dir": tmp_path / "ckpt"}
    for total in (5, 8):
        rng = torch.get_rng_state()
        before = copy.deepcopy(trainer.history)
        Counting.calls.clear()
        fit(trainer, data, dry_run=True, **given)
        assert Counting.calls[:6] == [True] * 4 + [False] * 2
        assert torch.equal(rng, torch.get_rng_state())
        assert trainer.history == before
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"] * (total == 8)
        printed = capsys.readouterr()
        assert "dry run: 2 updates, a validation, a save and a load in" in printed.out
        assert "dry-run" not in printed.err
        for each in (trainer, other):
            fit(each, data, **{**given, "max_updates": total, "checkpoint_dir": None})
            (tmp_path / "ckpt").mkdir(exist_ok=True)
        torch.testing.assert_close(trainer.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
        assert untimed(trainer.history.intervals) == untimed(other.history.intervals)
        assert trainer.position == other.position


def test_fit_resumes_from_a_url_and_a_dry_run_tries_it(tmp_path: Path) -> None:
    """On a machine without the local copies; a URL that cannot be written is refused by the dry run already."""
    url = f"file://{tmp_path}/far"
    given: dict[str, Any] = {"validate_every": 2, "checkpoint_dir": url}
    trainer, other, whole = make(), make(), make()
    fit(trainer, dry_run=True, max_updates=4, checkpoints={"staging_dir": tmp_path / "a"}, **given)
    assert list((tmp_path / "far").iterdir()) == []
    fit(trainer, max_updates=4, checkpoints={"staging_dir": tmp_path / "a", "keep": 1}, **given)
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["save-000002-step-4"]
    fit(other, max_updates=6, checkpoints={"staging_dir": tmp_path / "b"}, **given)
    fit(whole, max_updates=6, validate_every=2)
    torch.testing.assert_close(other.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="writing file://.*/file/run/.probe-"):
        fit(make(), dry_run=True, max_updates=4, checkpoint_dir=f"file://{tmp_path}/file/run")
    with pytest.raises(CheckpointError, match="knows no file system for s33://"):
        fit(make(), max_updates=4, checkpoint_dir="s33://bucket/run")


def test_validate_first_measures_the_untrained_model_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes no number, is in the checkpoint, and in the plot."""
    given = {"max_updates": 4, "validate_every": 2, "checkpoint_dir": tmp_path}
    expected = nn.functional.mse_loss(make().model(X), X.sum(1, keepdim=True)).item()
    seen = Validations()
    trainer, other = make(seen), make()
    fit(trainer, validate_first=True, progress=None, **given)
    fit(other, **{**given, "checkpoint_dir": None})
    assert trainer.history.first == {"epoch": 0, "update": 0, "val_loss": pytest.approx(expected, rel=1e-12)}
    assert f"before the first update: val_loss {expected:.4g}" in capsys.readouterr().out
    assert seen.seen[:2] == [("evaluate", 0), ("evaluate", 2)]
    assert untimed(trainer.history.intervals) == untimed(other.history.intervals)
    torch.testing.assert_close(trainer.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    again = make(seen)
    fit(again, validate_first=True, **{**given, "max_updates": 6})
    assert again.history.first == trainer.history.first
    assert seen.seen.count(("evaluate", 0)) == 1
    assert other.history.first == {}
    with pytest.raises(LoopError, match="`validate_first`, and no `val_set`"):
        make().fit(DATA, validate_first=True, global_batch_size=4)


@pytest.mark.parametrize("shuffle", [True, False])
def test_overfit_batches_trains_on_the_same_few_batches(shuffle: bool) -> None:
    """Those of epoch 0, in each epoch; also of a DataLoader that shuffles."""
    seen: list[list[float]] = []

    def forward(model: Any, batch: Any) -> Any:
        if model.training:
            seen.append(batch[0][:, 0].tolist())
        return model(batch[0]), batch[1]

    data = TensorDataset(X, X.sum(1, keepdim=True))
    trainer = make(forward=forward)
    given: dict[str, Any] = {"epochs": 3, "overfit_batches": 2, "nproc_per_node": 0, "progress": False}
    trainer.fit(data, global_batch_size=4, shuffle=shuffle, **given)
    assert [row["samples"] for row in trainer.history.epochs] == [8, 8, 8]
    assert len({tuple(map(tuple, seen[at : at + 2])) for at in (0, 2, 4)}) == 1
    assert trainer.history.epochs[2]["loss"] < trainer.history.epochs[0]["loss"]
    seen.clear()
    trainer.fit(DataLoader(data, 4, shuffle=shuffle), **given)
    assert len({tuple(map(tuple, seen[at : at + 2])) for at in (0, 2, 4)}) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overfit_batches": 0}, "`overfit_batches` is 0"),
        ({"overfit_batches": 2, "limit_batches": 3}, "`overfit_batches=2` and `limit_batches` of train"),
    ],
)
def test_overfit_batches_refuses_what_has_two_meanings(options: dict[str, Any], match: str) -> None:
    """Before anything is trained."""
    with pytest.raises(LoopError, match=match):
        make().fit(TensorDataset(X, X), epochs=1, global_batch_size=4, nproc_per_node=0, **options)
