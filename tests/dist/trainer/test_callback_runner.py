# SPDX-License-Identifier: Apache-2.0
"""On which ranks callbacks run, their state after a fit, and their failures."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpilot
from ddpilot.errors import WatchError
from tests.dist.trainer.bodies import BATCH_SIZE, make_data, make_trainer


class Diary(ddpilot.Callback):
    """Records its calls; `events` is returned."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.outputs: list[torch.Tensor] = []
        self.seen: list[tuple[int, int, str]] = []
        self._file: Any = None

    def _note(self, name: str, run: ddpilot.Run) -> None:
        self.events.append(name)
        self.seen.append((run.epoch, run.update, ",".join(sorted(run.metrics))))

    def on_fit_start(self, run: ddpilot.Run) -> None:
        self._file = open(os.devnull)
        self._note("fit_start", run)

    def on_epoch_start(self, run: ddpilot.Run) -> None:
        self._note("epoch_start", run)

    def on_update_end(self, run: ddpilot.Run) -> None:
        assert run.loss is not None
        assert not run.loss.requires_grad
        self._note("update_end", run)

    def on_evaluate_end(self, run: ddpilot.Run) -> None:
        assert run.metrics["val_distance"] > 0
        self._note("evaluate_end", run)

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        assert run.history.epochs[-1] is run.metrics
        x = make_data(3).tensors[0]
        before = torch.get_rng_state()
        self.outputs.append(run.call_model("forward", x))
        assert torch.equal(torch.get_rng_state(), before)
        self._note("epoch_end", run)

    def on_fit_end(self, run: ddpilot.Run) -> None:
        self._file.close()
        self._note("fit_end", run)


class Counter(ddpilot.Callback):
    """Runs on all ranks and adds up something of all of them."""

    ranks = "all"

    def __init__(self) -> None:
        self.total = 0.0

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        self.total += run.loop.reduce(run.loop.rank + 1.0, "sum").item()


def fit(trainer: ddpilot.Trainer, num_ranks: int = 2, **options: Any) -> ddpilot.History:
    """One fit on the usual data."""
    given: dict[str, Any] = {"global_batch_size": BATCH_SIZE, "nproc_per_node": num_ranks, **options}
    return trainer.fit(make_data(), make_data(21, first=60), **given)


def test_callbacks_are_called_in_order_and_return_their_state() -> None:
    """Rank 0's record is returned after the fit, and a second fit continues it; the sum covers all ranks."""
    diary, counter = Diary(), Counter()
    trainer = make_trainer(callbacks=[diary, counter])
    fit(trainer, epochs=2)
    epoch = ["epoch_start", *["update_end"] * 3, "evaluate_end", "epoch_end"]
    assert diary.events == ["fit_start", *epoch, *epoch, "fit_end"]
    assert diary.seen[1:7] == [
        (0, 0, ""),
        *[(0, update, "") for update in (1, 2, 3)],
        *[(0, 3, "data_wait,epoch,loss,lr,samples,samples_per_s,seconds,update,val_distance,val_loss")] * 2,
    ]
    assert counter.total == 6.0
    assert diary._file is None
    expected = trainer.call("forward", make_data(3).tensors[0])
    torch.testing.assert_close(diary.outputs[-1], expected, rtol=1e-10, atol=1e-12)
    fit(trainer, epochs=1)
    assert diary.events[-8:] == ["fit_start", *epoch, "fit_end"]
    assert diary.seen[-2][:2] == (2, 9)
    assert counter.total == 9.0


class Stop(ddpilot.Callback):
    """Stops on rank 0 after a number of updates."""

    def __init__(self, last: int) -> None:
        self._last = last

    def on_update_end(self, run: ddpilot.Run) -> None:
        if run.update == self._last:
            run.stop(everywhere=self.ranks == "all")


class StopTogether(Stop):
    """On all ranks."""

    ranks = "all"


def test_a_stop_of_all_ranks_keeps_the_weights_and_the_next_fit_resumes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the middle of an epoch: no validation, a row of the part; then the rest, as if there had been no stop.

    From the checkpoint, at another number of ranks, it goes on with the losses of the first part.
    """
    trainer, whole, third = make_trainer(callbacks=[StopTogether(4)]), make_trainer(), make_trainer()
    fit(trainer, epochs=2, checkpoint_dir=tmp_path)
    fit(third, 3, until_epoch=2, checkpoint_dir=tmp_path)
    assert (trainer.position.epoch, trainer.position.next_batch, trainer.position.num_updates) == (1, 3, 4)
    assert [sorted(row) for row in trainer.history.epochs][1:] == [
        ["data_wait", "epoch", "loss", "lr", "samples", "samples_per_s", "seconds", "update"]
    ]
    assert trainer.history.epochs[1]["samples"] == 24
    assert re.search(
        r"stopped after update 4 in the middle of epoch 1 \(a callback requested it\)", capfd.readouterr().out
    )
    trainer.callbacks.clear()
    fit(trainer, epochs=1)
    assert [(row["epoch"], row["samples"]) for row in trainer.history.epochs] == [(0, 53), (1, 24), (1, 29)]
    fit(whole, epochs=2)
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=1e-10, atol=1e-13)
    assert third.history.updates == [pytest.approx(row, rel=1e-10) for row in whole.history.updates]
    assert [row["samples"] for row in third.history.epochs] == [53, 53]
    assert third.history.epochs[1]["loss"] == pytest.approx(whole.history.epochs[1]["loss"], rel=1e-10)


def test_a_stop_of_rank_zero_ends_fit_on_all_ranks() -> None:
    """Soon after: when the ranks exchange their flags."""
    trainer = make_trainer(callbacks=[Stop(4)])
    fit(trainer, epochs=1000)
    assert 4 <= trainer.position.num_updates < 4 + 40


class Impatient(ddpilot.Callback):
    """Presses Ctrl-C on its rank when something happens."""

    ranks = "all"

    def __init__(self, event: str) -> None:
        self._event = event

    def on_fit_start(self, run: ddpilot.Run) -> None:
        self._press("fit_start")

    def on_fit_end(self, run: ddpilot.Run) -> None:
        self._press("fit_end")

    def _press(self, event: str) -> None:
        if event == self._event:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_ctrl_c_before_the_first_and_after_the_last_update_loses_nothing(num_ranks: int) -> None:
    """`fit` returns with the weights trained so far."""
    trainer = make_trainer(callbacks=[Impatient("fit_end")])
    fit(trainer, num_ranks, epochs=2)
    assert trainer.position.num_updates == 6
    trainer.callbacks[0] = Impatient("fit_start")
    fit(trainer, num_ranks, epochs=2)
    assert trainer.position.num_updates == 6
    assert [row["epoch"] for row in trainer.history.epochs] == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class FullDisk(ddpilot.Callback):
    """Writes into a device that is always full, with each update or at the end of an epoch."""

    def __init__(self, event: str) -> None:
        self.event = event

    def on_fit_start(self, run: ddpilot.Run) -> None:
        self._file = open("/dev/full", "w", buffering=1)

    def on_update_end(self, run: ddpilot.Run) -> None:
        if self.event == "update":
            self._file.write("loss\n")

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        if self.event == "epoch" or (self.event == "last epoch" and run.epoch + 1 == run.num_epochs):
            self._file.write("loss\n")


class Witness(ddpilot.Callback):
    """Leaves a file for each rank that heard of a failure."""

    ranks = "all"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_exception(self, run: ddpilot.Run, error: BaseException) -> None:
        (self._folder / f"{run.loop.rank}-{run.update}").write_text(type(error).__name__)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize(("event", "first"), [("update", 1), ("epoch", 3)])
def test_what_rank_zero_cannot_write_ends_fit_on_all_ranks(event: str, first: int, tmp_path: Path) -> None:
    """OSError with the line of the callback; every rank heard of it after the same update; nothing here changed."""
    trainer = make_trainer(callbacks=[FullDisk(event), Witness(tmp_path)])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ddpilot.RankError, match='self._file.write\\("loss') as caught:
        fit(trainer, epochs=2)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, OSError)
    heard = {path.name: path.read_text() for path in tmp_path.iterdir()}
    updates = {int(name.partition("-")[2]) for name in heard}
    assert {name[0]: kind for name, kind in heard.items()} == {"0": "OSError", "1": "RemoteRankError"}
    assert len(updates) == 1
    assert first <= updates.pop() <= 6
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert trainer.history.epochs == []
    assert trainer.position.num_updates == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_what_rank_zero_cannot_write_after_the_last_update_is_raised_and_loses_nothing() -> None:
    """RankError with the callback's line; rank 0's other callbacks get all events, and their state is returned."""
    diary = Diary()
    trainer, whole = make_trainer(callbacks=[FullDisk("last epoch"), diary]), make_trainer()
    with pytest.raises(ddpilot.RankError, match='self._file.write\\("loss') as caught:
        fit(trainer, epochs=2)
    assert isinstance(caught.value.__cause__, OSError)
    assert "Training had already ended: the trained weights and the history were loaded here" in str(caught.value)
    assert "running `Trainer.fit` on 2 ranks" in str(caught.value)
    fit(whole, 0, epochs=2)
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=1e-10, atol=1e-13)
    assert trainer.position == whole.position
    assert [row["epoch"] for row in trainer.history.epochs] == [0, 1]
    assert diary.events[-1] == "fit_end"


class Lonely(ddpilot.Callback):
    """Runs on rank 0 only, and waits for the other ranks."""

    def on_epoch_end(self, run: ddpilot.Run) -> None:
        torch.distributed.barrier()


def test_a_barrier_on_rank_zero_alone_ends_the_fit_with_its_line() -> None:
    """Only the watch detects it: the other ranks call a different collective next."""
    with pytest.raises(WatchError, match=r"rank 0 +barrier.*torch.distributed.barrier\(\)"):
        fit(make_trainer(callbacks=[Lonely()]), epochs=2)
