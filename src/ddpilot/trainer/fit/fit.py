# SPDX-License-Identifier: Apache-2.0
"""The training of `Trainer.fit` on each rank, from its loop to its result."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpilot.checkpoint.remote.store import check_writable_url, is_url
from ddpilot.errors import LoopError
from ddpilot.group.decorators import on_ranks
from ddpilot.group.device import capture_rng, restore_rng
from ddpilot.trainer.callback import CallbackRunner
from ddpilot.trainer.core import Position, TrainerCore
from ddpilot.trainer.fit.epochs import FitEpochs, report_skipped_rest, report_stop
from ddpilot.trainer.fit.preparation import copy_trainer, limit_loaders, make_loaders, prepare_fit
from ddpilot.trainer.fit_options import FitOptions
from ddpilot.trainer.ranks import FitResult, collect_result, group_here
from ddpilot.trainer.run import Run
from ddpilot.training.coordination.stop import StopSignals
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.models.sharding import has_shards
from ddpilot.training.options import EACH_EPOCH
from ddpilot.training.resume.data_position import describe_data
from ddpilot.training.step.accumulation import AccumulationSchedule


def fit_on_rank(trainer: TrainerCore, fit: FitOptions) -> FitResult | None:
    """Train on a rank that was started for it; returns on rank 0 what the parent loads. Collective."""
    with StopSignals() as signals:
        late_error = fit_here(trainer, fit, signals)
        return collect_result(trainer, group_here(), late_error)


def fit_here(trainer: TrainerCore, fit: FitOptions, signals: StopSignals) -> Exception | None:
    """Train `trainer`'s model on this rank, together with the other ranks. Collective.

    `signals`: already entered, so that an interrupt before the first update or after the last one loses nothing.
    Returns the exception that a callback of rank 0 raised after the last update (on other ranks, the error that reports
    it), which the caller raises once the trained state is safe.
    """
    if fit.dry_run:
        _run_dry(trainer, fit, signals)
        return None
    with _loop_of(trainer, fit, signals) as loop:
        return _fit_by(loop, trainer, fit)


@contextmanager
def _loop_of(trainer: TrainerCore, fit: FitOptions, signals: StopSignals) -> Iterator[Loop]:
    """Yield the loop of a fit, and release its checkpoint directory."""
    loop = Loop(
        trainer.seed,
        accumulate=trainer.accumulate,
        precision=trainer.precision,
        max_time_s=fit.max_time_s,
        check_finite=fit.check_finite,
        progress=fit.progress,
        group=group_here(),
        **fit.checkpoints,
    )
    loop.stop_by(signals)
    try:
        yield loop
    finally:  # a traceback may keep the loop alive, and with it the checkpoint directory
        loop.release_directory()


def _run_dry(trainer: TrainerCore, fit: FitOptions, signals: StopSignals) -> None:
    """Try two updates, two batches of validation, a save and a load, on copies. Collective."""
    group = group_here()
    is_divided = has_shards(trainer.model.parameters())
    if is_divided or any(isinstance(one, ShardedState) for one in trainer.optimizers.values()):
        found = "parameters or optimizers whose state an earlier fit divided among these ranks"
        raise LoopError("trying a fit (dry_run=True)", found=found, fix="Try it before the first fit.", rank=group.rank)
    folder = on_ranks(0, broadcast=True)(_make_folder)(fit.checkpoint_dir)
    rng, began_s = capture_rng(group.device), time.perf_counter()
    short = dataclasses.replace(
        fit,
        dry_run=False,
        epochs=1,
        until_epoch=None,
        max_updates=None,
        validate_every=EACH_EPOCH,
        overfit_batches=None,
        limit_batches={
            "train": 2 * AccumulationSchedule.parse(trainer.accumulate, "fitting").size_at(0, 0),
            "validation": 2,
        },
        checkpoints={"checkpoint_dir": folder, "resume": True},
        progress=False,
    )
    try:
        trial, resumed = copy_trainer(trainer), copy_trainer(trainer)
        fit_here(trial, short, signals)
        with _loop_of(resumed, short, signals) as loop:
            prepare_fit(resumed, loop, short)
            loop.resume()
    finally:
        restore_rng(rng, group.device)
        if group.is_rank_zero:
            shutil.rmtree(str(folder), ignore_errors=True)
    if group.is_rank_zero:
        what = f"{trial.position.num_updates} updates{', a validation' * (fit.val_set is not None)}, a save and a load"
        sys.stdout.write(f"dry run: {what} in {time.perf_counter() - began_s:.1f} s; nothing was kept\n")
        sys.stdout.flush()


def _make_folder(checkpoint_dir: str | os.PathLike[str] | None) -> str:
    if is_url(checkpoint_dir):
        check_writable_url(str(checkpoint_dir))
        checkpoint_dir = None
    parent = None if checkpoint_dir is None else Path(checkpoint_dir).resolve().parent
    if parent is not None and not parent.is_dir():
        parent = None
    return tempfile.mkdtemp(prefix=".dry-run-", dir=parent)


def _fit_by(loop: Loop, trainer: TrainerCore, fit: FitOptions) -> Exception | None:
    loop.findings = trainer.findings
    train_loader, val_loaders = limit_loaders(make_loaders(fit, loop), fit)
    data = describe_data(train_loader)
    trainer.batch_size = getattr(getattr(train_loader, "plan", None), "global_batch_size", None) or trainer.batch_size
    _start(loop, trainer.position, data)
    run, state = prepare_fit(trainer, loop, fit)
    _resume(loop, run, fit)
    callbacks = CallbackRunner(trainer.callbacks, run)
    here = FitEpochs(trainer, run, state, (train_loader, val_loaders), callbacks, fit)
    try:
        callbacks.call("on_fit_start")
        if fit.validate_first and not run.update:
            here.validate_first()
        with callbacks.around_steps():
            for _ in loop.epochs(run.num_epochs, max_updates=run.max_updates):
                here.train_epoch()
        here.end()
        here.finish_average()
        callbacks.is_over = True
        callbacks.call("on_fit_end")
    except BaseException as error:
        callbacks.call_exception(error)
        raise
    report_stop(loop)
    trainer.explanation = loop.explain()
    trainer.position = Position(loop.epoch, loop.next_batch, loop.num_updates, data)
    trainer.findings = loop.findings
    return callbacks.late_error


def _start(loop: Loop, position: Position, data: Mapping[str, Any]) -> None:
    epoch, next_batch = position.epoch, position.next_batch
    if next_batch and position.data != data:  # with different data there is no rest of the epoch: the next epoch starts
        report_skipped_rest(loop, position, data)
        epoch, next_batch = epoch + 1, 0
    loop.start_at(epoch, next_batch=next_batch, num_updates=position.num_updates)


def _resume(loop: Loop, run: Run, fit: FitOptions) -> None:
    """Resume from the checkpoint, if there is one, and report how much is left."""
    is_resumed = fit.checkpoint_dir is not None and fit.checkpoints["resume"] and loop.resume(other_data=fit.other_data)
    unit, done, total = "updates", loop.num_updates, run.max_updates
    if total is None:
        unit, done, total = "epochs", loop.epoch, run.num_epochs or 0
    if is_resumed and fit.progress is not False:
        where = f"epoch {loop.epoch}" if unit == "epochs" else f"update {done}"
        left = f"{max(0, total - done)} more, up to {total}"
        loop.print(f"resuming at {where}; {fit.goal}: {left}", flush=True)
    elif not is_resumed and fit.is_total and 0 < total <= done:
        more = f"; with a `checkpoint_dir` `epochs` is a total: epochs={done + total} trains {total} more"
        hint = more if fit.goal.startswith("epochs") else ""
        loop.print(f"nothing to train: {done} of {total} {unit} are done already{hint}", flush=True)
