# SPDX-License-Identifier: Apache-2.0
"""When a loop saves, what it goes on from, and how it leaves."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from ddpilot import CheckpointError, CorruptCheckpointError, FakeGroup, LoopError, MismatchedCheckpointError
from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.training.loop import Loop
from tests.unit.training.resume.runs import BATCHES, Run, latest, position, saved_steps

pytestmark = pytest.mark.usefixtures("compiler_is_loaded")


def test_epochs_save_after_each_and_go_on_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the schedule's step that comes last in the epoch; a run that is done says so, and does nothing."""
    first = Run(tmp_path).train(1)
    assert position(tmp_path) == (1, 0, 0, BATCHES)
    second = Run(tmp_path).train(3)
    assert {epoch for epoch, _ in second.seen} == {1, 2}
    assert second.loop.num_updates == 3 * BATCHES
    assert second.scheduler.last_epoch == 3
    whole = Run(tmp_path / "other").train(3)
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.model.weight, whole.model.weight)
    assert Run(tmp_path).train(3).seen == []
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"ddpilot: resuming from {tmp_path}/save-000001-step-3: epoch 1, after 3 updates, on 1 rank"
    done = f"ddpilot: the run in {tmp_path} is finished: it has made 3 epochs of 3. Pass a larger number of epochs"
    assert said[1:] == [f"{done} to train longer, or start over with `resume=False`."]


@pytest.mark.parametrize("how", ["asked", "SIGINT"])
def test_leaving_in_the_middle_saves_there(tmp_path: Path, how: str) -> None:
    """By `loop.stop()` or Ctrl-C; what follows `batches` in the epoch is not in it, and is done by the next run."""
    run = Run(tmp_path)

    def ask() -> None:
        if run.loop.num_updates == 1:
            run.loop.stop() if how == "asked" else signal.raise_signal(signal.SIGINT)

    run.train(2, ask)
    assert run.scheduler.last_epoch == 1
    assert position(tmp_path)[:2] == (0, run.loop.next_batch) != (0, 0)
    again = Run(tmp_path).train(2)
    assert run.seen + again.seen == Run(tmp_path / "other").train(2).seen
    assert again.scheduler.last_epoch == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_s_signal_ends_the_process_with_75_after_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """It is on the disk by then, and what is to do is said."""
    run = Run(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run.train(2, lambda: signal.raise_signal(number))
    assert ended.value.code == 75
    assert position(tmp_path)[1] == len(run.seen)
    said = capsys.readouterr().err
    assert (
        f"ddpilot: {number.name}: the checkpoint in {tmp_path} is written; leaving epoch 0 with exit code 75." in said
    )


def test_a_signal_that_comes_with_the_check_before_a_save_ends_the_process_too(tmp_path: Path) -> None:
    """The ranks exchange their flags there, after they looked for reasons to stop."""
    run = Run(tmp_path, save_every="1 updates")
    parts = run.loop._parts
    parts.checkpointer._check = lambda: parts.flags.agree("SIGTERM")
    with pytest.raises(SystemExit) as ended:
        run.train(2)
    assert ended.value.code == 75
    assert position(tmp_path)[1] == len(run.seen) == 1


def test_ctrl_c_says_once_where_the_run_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of an epoch, and no more than once; a stop that the program asked for says nothing."""
    run = Run(tmp_path)
    run.train(2, lambda: signal.raise_signal(signal.SIGINT) if len(run.seen) == 1 else None)
    run.train(2)
    said = f"ddpilot: Ctrl-C: the checkpoint in {tmp_path} is written. The same lines resume there.\n"
    assert capsys.readouterr().err == said
    asked = Run(tmp_path / "asked")
    asked.train(2, asked.loop.stop)
    assert capsys.readouterr().err == ""


def test_accumulate_may_change_at_the_end_of_an_epoch_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There it is said; the rest of an epoch would make other updates."""
    middle = Run(tmp_path / "middle")
    middle.train(1, middle.loop.stop)
    with pytest.raises(MismatchedCheckpointError, match=r"`accumulate` was 1, is 2 \(the rest of the epoch"):
        Run(tmp_path / "middle", accumulate=2).train(1)
    assert "resume" not in capsys.readouterr().err
    Run(tmp_path / "end").train(1)
    assert Run(tmp_path / "end", accumulate=2).train(2).loop.num_updates == BATCHES + 2
    assert "after 3 updates, on 1 rank, with accumulate=2 instead of 1\n" in capsys.readouterr().err


def test_what_is_refused_says_how_to_go_on_and_not_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other data where an epoch begins; nothing that is whole."""
    Run(tmp_path).train(1)
    said = r"dataset differs\)\. Continue with .* loop.resume\(other_data=True\).* Or .*`resume=False`, or .*load"
    with pytest.raises(MismatchedCheckpointError, match=said):
        Run(tmp_path, num_samples=11).train(2)
    assert capsys.readouterr().err == ""
    (latest(tmp_path).path / "state.pt").write_bytes(b"torn")
    with pytest.raises(
        CorruptCheckpointError, match="start over with `resume=False`, which moves the damaged ones away"
    ):
        Run(tmp_path).train(2)


def test_a_best_without_its_metric_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the first checkpoint of an epoch that lacks it."""
    Run(tmp_path, best="max acc").train(2)
    said = "no best checkpoint was chosen: `best` is 'max acc', and this epoch has no metric 'acc'. Pass it within the "
    assert capsys.readouterr().err == f"ddpilot: {said}epoch: loop.save({{'acc': ...}}).\n"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"keep": None}, "`keep` is None, and there is no `checkpoint_dir`"),
        ({"best": "max acc"}, "`best` is 'max acc', and there is no `checkpoint_dir`.*Pass"),
        ({"save_every_s": 5.0}, "`save_every_s` is 5.0, and there"),
        ({"resume": "auto"}, "`resume` is 'auto'. Pass True"),
        ({"checkpoint_dir": ""}, "`checkpoint_dir` is empty"),
    ],
)
def test_loop_refuses_options_of_checkpoints_that_are_not_made(options: dict[str, Any], found: str) -> None:
    """Each with its value."""
    with pytest.raises(LoopError, match=found):
        Loop(group=FakeGroup(), **options)


def test_save_is_made_after_the_update_that_is_under_way(tmp_path: Path) -> None:
    """Before the step and after it are the same; in the middle of an accumulation group it waits for its end."""
    run = Run(tmp_path, accumulate=2, keep=None)
    for _ in run.loop.epochs(1):
        for (x,) in run.loop.batches(run.loader):
            if not run.loop.is_update:
                run.loop.save()
            with run.loop.accumulate(run.model):
                run.loop.backward(run.model(x).mean())
            run.loop.step(run.optimizer)
    assert CheckpointDir(tmp_path).names() == ["save-000002-step-2", "save-000001-step-1"]
    first = CheckpointDir(tmp_path).open("save-000001-step-1")
    assert (first.manifest.progress.batch, first.manifest.progress.samples_seen) == (2, 8)


def test_save_in_an_epoch_gives_its_checkpoint_metrics(tmp_path: Path) -> None:
    """One for each epoch, made at its end; the best stays, whatever came later, and its weights can be loaded."""
    run = Run(tmp_path, keep=1, best="max acc")
    for epoch in run.loop.epochs(3):
        run.read()
        run.loop.save({"acc": [0.1, 0.9, 0.5][epoch], "loss": 1})
        if epoch == 1:
            best = run.model.weight.detach().clone()
    assert CheckpointDir(tmp_path).names() == ["save-000003-step-9", "save-000002-step-6"]
    assert dict(latest(tmp_path).manifest.metrics) == {"acc": 0.5, "loss": 1.0}
    run.loop.load(run.model, tmp_path / "best")
    assert torch.equal(run.model.weight, best)


def test_save_outside_of_epochs_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """For loops of one's own; the pass that is over is not read again."""
    run = Run(tmp_path)
    run.read()
    run.loop.save()
    assert position(tmp_path) == (0, 0, 1, BATCHES)
    again = Run(tmp_path)
    assert again.loop.resume()
    again.read()
    assert again.seen == []
    again.read()
    assert len(again.seen) == BATCHES


@pytest.mark.parametrize(
    ("every", "steps"), [({"save_every_updates": 1}, [1, 2, 3, 3]), ({"save_every_s": 1e-9}, [2, 3])]
)
def test_saves_in_the_middle_of_an_epoch_when_it_is_time(
    tmp_path: Path, every: dict[str, Any], steps: list[int]
) -> None:
    """By updates; or by the clock, with the exchange after, so that all ranks know; and always at the end."""
    Run(tmp_path, keep=None, **every).train(1)
    assert [int(name.split("-")[-1]) for name in reversed(CheckpointDir(tmp_path).names())] == steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [(2, [2, 4, 6, 8, 9]), ("2 updates", [2, 4, 6, 8, 9]), ("2 epochs", [6, 9]), ("1 epoch", [3, 6, 9]), (50, [9])],
)
def test_save_every_counts_updates_or_epochs_of_the_whole_training(
    tmp_path: Path, every: int | str, steps: list[int]
) -> None:
    """And always saves at the end; not after each epoch, as it is said how often. So does a run in two parts."""
    Run(tmp_path / "whole", keep=None, save_every=every).train(3)
    assert saved_steps(tmp_path / "whole") == steps
    Run(tmp_path / "parts", keep=None, save_every=every).train_updates(5)
    Run(tmp_path / "parts", keep=None, save_every=every).train(3)
    assert saved_steps(tmp_path / "parts") == sorted({*steps, 5})


def test_a_stop_between_epochs_saves_an_epoch_that_was_not_due(tmp_path: Path) -> None:
    """The next run does not train it again."""
    run = Run(tmp_path, save_every="5 epochs")
    for epoch in run.loop.epochs(9):
        run.read()
        if epoch == 1:
            run.loop.stop()
    assert position(tmp_path) == (2, 0, 0, 2 * BATCHES)


def test_epochs_end_after_a_number_of_updates_and_resume_there(tmp_path: Path) -> None:
    """Within an epoch and at its end; a repeated run trains nothing, and a larger total the rest."""
    whole = Run(tmp_path / "whole").train_updates(8)
    assert position(tmp_path / "whole") == (2, 2, 0, 8)
    seen: list[Any] = []
    for total in (1, 3, 3, 5, 8):
        run = Run(tmp_path / "parts").train_updates(total)
        assert run.loop.num_updates == total
        assert not run.loop.should_stop
        seen += run.seen
    assert seen == whole.seen
    torch.testing.assert_close(run.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    run.train_updates(9)  # the same loop, too
    assert (run.loop.num_updates, run.loop.epoch, run.loop.next_batch) == (9, 3, 0)


def test_epochs_need_an_end(tmp_path: Path) -> None:
    """A number of epochs or of updates; and data, without which the number is never reached."""
    run = Run(tmp_path)
    with pytest.raises(LoopError, match="neither a number of epochs nor `max_updates`"):
        next(iter(run.loop.epochs()))
    with pytest.raises(LoopError, match=r"`max_updates` is 1\.5"):
        next(iter(run.loop.epochs(max_updates=1.5)))  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="no samples were read in epoch 0, so that number"):
        list(run.loop.epochs(max_updates=3))


def test_updates_that_are_all_made_leave_further_passes_empty(tmp_path: Path) -> None:
    """The last batch of an epoch's first pass makes the last update."""
    run = Run(tmp_path)
    for _ in run.loop.epochs(max_updates=BATCHES):
        run.read()
        run.read()
    assert (len(run.seen), run.loop.num_updates) == (BATCHES, BATCHES)
    assert position(tmp_path) == (1, 0, 0, BATCHES)


def test_an_epoch_of_two_passes_goes_on_in_the_second(tmp_path: Path) -> None:
    """The first is not read again."""
    run = Run(tmp_path)
    for _ in run.loop.epochs(1):
        run.read()
        run.read(run.loop.stop)
    assert position(tmp_path)[:3] == (0, run.loop.next_batch, 1)
    again = Run(tmp_path)
    for _ in again.loop.epochs(1):
        again.read()
        again.read()
    assert len(run.seen) + len(again.seen) == 2 * BATCHES
    assert position(tmp_path)[:3] == (1, 0, 0)


@pytest.mark.parametrize("how", ["asked", "SIGINT", "SIGTERM"])
@pytest.mark.parametrize("batch", [1, BATCHES + 1])
def test_an_epoch_of_two_passes_that_was_left_in_one_of_them_loses_no_batch(
    tmp_path: Path, how: str, batch: int
) -> None:
    """The passes after it are empty, and the next run goes on in that one."""
    run = Run(tmp_path)

    def ask() -> None:
        if len(run.seen) == batch:
            run.loop.stop(everywhere=True) if how == "asked" else signal.raise_signal(getattr(signal, how))

    with contextlib.suppress(SystemExit):
        for _ in run.loop.epochs(2):
            run.read(ask)
            run.read(ask)
    assert len(run.seen) in (batch, batch + 1)
    assert position(tmp_path)[:3] == (0, len(run.seen) - (BATCHES if batch > BATCHES else 0), int(batch > BATCHES))
    again = Run(tmp_path)
    for _ in again.loop.epochs(2):
        again.read()
        again.read()
    assert len(run.seen + again.seen) == 4 * BATCHES
    one_pass = Run(tmp_path / "other").train(1).seen
    assert [samples for _, samples in run.seen + again.seen] == 4 * [samples for _, samples in one_pass]


def test_a_save_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the loop over epochs is left by `break`, and where all ranks have left in the middle."""
    run = Run(tmp_path)
    for _ in run.loop.epochs(2):
        run.read()
        run.loop.save()
        break
    assert "was not made: the epoch was left before its end. To end training early, call loop.stop()" in (
        capsys.readouterr().err
    )
    assert CheckpointDir(tmp_path).names() == []
    other = Run(tmp_path)
    for _ in other.loop.epochs(2):
        other.read(other.loop.stop)
        other.loop.save({"acc": 1.0})
    assert "loop.save() ignored: this epoch was stopped early and already has a checkpoint" in capsys.readouterr().err


def test_resume_false_moves_what_is_there_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is lost, and the new run's checkpoints are the only ones it finds."""
    Run(tmp_path).train(2)
    before = position(tmp_path)
    for number in (1, 2):
        Run(tmp_path, resume=False, keep=1).train(1)
        moved = f"the checkpoints in {tmp_path} were moved to {tmp_path}/earlier-{number}"
        assert f"starting over (resume=False); {moved}" in capsys.readouterr().err
        assert CheckpointDir(tmp_path).names() == ["save-000001-step-3"]
    assert position(tmp_path / "earlier-1") == before


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on from the one before it."""
    Run(tmp_path).train(2)
    (latest(tmp_path).path / "state.pt").write_bytes(b"torn")
    run = Run(tmp_path).train(2)
    assert {epoch for epoch, _ in run.seen} == {1}
    assert "state.pt has 4 bytes, not " in capsys.readouterr().err


def test_what_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    """With the path to it."""
    run = Run(tmp_path)

    class Thing:
        def state_dict(self) -> dict[str, Any]:
            return {"fn": print}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    run.loop.track(thing=Thing())
    with pytest.raises(CheckpointError, match=r"\['state'\]\['others'\]\['thing'\]\['fn'\] is a builtins.builtin"):
        run.train(1)
    assert run.seen == []


def test_loop_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    """Arguments, calls without a directory, metrics without the best's, a directory with somebody else's `latest`."""
    with pytest.raises(LoopError, match="`save_every_s` is 0. Pass a number above 0"):
        Run(tmp_path, save_every_s=0)
    with pytest.raises(CheckpointError, match='`best` is \'acc\'. Use "max acc" or "min loss"'):
        Run(tmp_path, best="acc")
    bare = Loop(group=FakeGroup())
    with pytest.raises(LoopError, match="saving: this loop has no `checkpoint_dir`. Pass `checkpoint_dir=` to Loop"):
        bare.save()
    with pytest.raises(LoopError, match="resuming: this loop has no `checkpoint_dir`"):
        bare.resume()
    run = Run(tmp_path, best="min loss")
    with pytest.raises(LoopError, match="`best` is 'min loss', and the metrics are 'acc'"):
        run.loop.save({"acc": 1.0})
    run.train(1)
    with pytest.raises(LoopError, match="training has begun already. Resume before the first epoch"):
        run.loop.resume()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "latest").write_text("notes of mine")
    with pytest.raises(
        CheckpointError, match="there is a `latest` of a different program, which the next checkpoint would"
    ):
        Run(tmp_path / "mine")
    assert (tmp_path / "mine" / "latest").read_text() == "notes of mine"


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    """Another seed; in the middle of an epoch other data, batches or order too; each with what it was and is."""
    run = Run(tmp_path)
    run.train(1, run.loop.stop)
    assert run.loop.next_batch
    with pytest.raises(MismatchedCheckpointError, match="`seed` was 0, is 1"):
        Run(tmp_path, seed=1).train(1)
    with pytest.raises(MismatchedCheckpointError, match="`dataset_length` was 10, is 11"):
        Run(tmp_path, num_samples=11).train(1)
    with pytest.raises(MismatchedCheckpointError, match="`global_batch_size` was 4, is 5 .*counts global batches"):
        Run(tmp_path, batch_size=5).train(1)
    other = Run(tmp_path)
    other.loader = other.loop.loader(other.loader.dataset, global_batch_size=4, shuffle=True)
    with pytest.raises(MismatchedCheckpointError, match="shuffle, drop_last, weights, the sampler or who divides"):
        other.train(1)
    assert other.seen == []


def test_resume_at_the_beginning_of_an_epoch_takes_other_batches_and_on_request_other_data(tmp_path: Path) -> None:
    """No sample of an epoch is lost by that."""
    Run(tmp_path).train(1)
    assert len(Run(tmp_path, batch_size=5).train(2).seen) == 2
    longer = Run(tmp_path, num_samples=12, batch_size=5)
    with pytest.raises(MismatchedCheckpointError, match="`dataset_length` was 10, is 12"):
        longer.train(3)
    longer = Run(tmp_path, num_samples=12, batch_size=5)
    assert longer.loop.resume(other_data=True)
    assert len(longer.train(3).seen) == 3


class Stream(IterableDataset[torch.Tensor]):
    """Ten samples, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0).reshape(-1, 1))


def test_a_stream_goes_on_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was read is passed over, and what was not comes; where nothing does, that is said."""
    seen: list[float] = []
    for stops in (True, False):
        loop = Loop(group=FakeGroup(), checkpoint_dir=tmp_path)
        loader = loop.loader(Stream(), global_batch_size=4)
        for _ in loop.epochs(1):
            for x in loop.batches(loader):
                seen += x.flatten().tolist()
                if stops:
                    loop.stop()
    assert seen == [float(number) for number in range(10)]
    assert "nothing was left" not in capsys.readouterr().err
    place = Loop(group=FakeGroup())
    place.next_batch = 7
    assert list(place.batches(place.loader(Stream(), global_batch_size=4))) == []
    left = "nothing was left of epoch 0, which resumes at batch 7: the stream ends before that batch."
    assert left in capsys.readouterr().err


def test_batches_that_ranks_divide_themselves_are_refused_in_the_middle_at_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Nobody knows which of their samples are left."""
    for size, refused in ((1, False), (2, True)):
        loop = Loop(group=FakeGroup(world_size=size), checkpoint_dir=tmp_path)
        loader = loop.loader(Stream(), global_batch_size=4, divides_itself=True)
        batches = loop.batches(loader)
        for _ in loop.epochs(1):
            if refused:
                with pytest.raises(MismatchedCheckpointError, match="the rest of the epoch would be different samples"):
                    next(batches)
                return
            for _ in batches:
                loop.stop()
    pytest.fail("it went on")


class Unsaveable:
    """Returns what no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"fn": len}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_what_cannot_be_saved_is_refused_before_training_also_after_resume(tmp_path: Path) -> None:
    """As a Trainer resumes, whose fit calls `resume` itself."""
    run = Run(tmp_path)
    run.loop.track(odd=Unsaveable())
    assert not run.loop.resume()
    with pytest.raises(CheckpointError, match=r"\['odd'\]\['fn'\] is a builtins"):
        run.train(1)
    assert run.seen == []


class Numbers(IterableDataset[tuple[torch.Tensor]]):
    """A stream with a state, which holds more than can be saved where `extra` says so."""

    def __init__(self, num: int, extra: Any = None) -> None:
        self.num, self.extra = num, extra
        self.position = 0
        self.read: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        while self.position < self.num:
            self.position += 1
            self.read.append(self.position - 1)
            yield (torch.tensor([float(self.position - 1)]),)
        self.position = 0


def test_a_stream_with_a_state_goes_there_at_once(tmp_path: Path) -> None:
    """After a stop in the middle nothing that lies before is read again."""
    stream_run(tmp_path, Numbers(22), stops=True)
    again = stream_run(tmp_path, Numbers(22))
    assert again.loader.dataset.read == [*range(8, 22), *range(22)]
    assert [int(number) for _, batch in again.seen for number in batch] == again.loader.dataset.read


def test_a_stream_whose_state_cannot_be_saved_is_read_from_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is said once; the samples are the same."""
    stream_run(tmp_path, Numbers(22, extra=len), stops=True)
    assert "ddpilot: the state of the dataset's state_dict() cannot be saved: a resumed run" in capsys.readouterr().err
    again = stream_run(tmp_path, Numbers(22, extra=len))
    assert [int(number) for _, batch in again.seen for number in batch] == [*range(8, 22), *range(22)]
    assert again.loader.dataset.read == [*range(22), *range(22)]
    said = f"resuming from {tmp_path}/save-000001-step-2: epoch 0, batch 2, after 2 updates, on 1 rank "
    assert f"{said}(`loop.batch.index` counts from there; enumerate() begins at 0)" in capsys.readouterr().err


def stream_run(folder: Path, dataset: Numbers, *, stops: bool = False) -> Run:
    """Two epochs over `dataset`; with `stops` up to the second batch of the first."""
    run = Run(folder)
    run.loader = run.loop.loader(dataset, global_batch_size=4)

    def stop() -> None:
        if stops and run.loop.num_updates == 2:
            run.loop.stop(everywhere=True)

    return run.train(2, stop)


def test_a_signal_ends_the_loop_after_the_upload_to_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it is a scheduler's; the same lines resume there from an empty local directory."""
    url = f"file://{tmp_path}/far/run 7"
    run = Run(url, staging_dir=tmp_path / "a")
    with pytest.raises(SystemExit) as caught:
        run.train(2, lambda: signal.raise_signal(signal.SIGTERM) if run.loop.num_updates == 1 else None)
    assert caught.value.code == 75
    name = f"save-000001-step-{run.loop.num_updates}"
    assert [path.name for path in (tmp_path / "far" / "run 7").iterdir()] == [name]
    monkeypatch.setenv("DDPILOT_STAGING_DIR", str(tmp_path / "b"))
    again = Run(f"{url}/").train(2)
    assert run.seen + again.seen == Run(tmp_path / "other").train(2).seen
    said = capsys.readouterr().err
    assert f"SIGTERM: the checkpoint in {url} is written; leaving epoch 0 with exit code 75" in said
    assert f"resuming from {url}/{name}: epoch 0, batch " in said


def test_resume_false_lists_what_is_at_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is copied, and the new run begins at its first update."""
    url = f"file://{tmp_path}/far"
    Run(url, staging_dir=tmp_path / "a").train(1)
    again = Run(url, staging_dir=tmp_path / "a", resume=False).train(1)
    assert len(again.seen) == BATCHES
    said = f"starting over (resume=False); the checkpoints in {url} stay there and are listed in {url}/earlier-1"
    assert said in capsys.readouterr().err
    assert CheckpointDir(url, staging_dir=tmp_path / "b").names() == ["save-000002-step-3"]
