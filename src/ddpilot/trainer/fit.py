# SPDX-License-Identifier: Apache-2.0
"""The training of `Trainer.fit` on each rank: what happens after each update, interval and epoch."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.checkpoint.remote.store import check_writable_url, is_url
from ddpilot.data.options import WORKER_OPTIONS
from ddpilot.data.shards.dataset import is_dataset_of_shards
from ddpilot.errors import LoopError
from ddpilot.group.decorators import on_ranks
from ddpilot.group.device import capture_rng, restore_rng
from ddpilot.trainer.callback import CallbackRunner
from ddpilot.trainer.checks import check_sharded
from ddpilot.trainer.core import FitState, Position, TrainerCore
from ddpilot.trainer.fit_options import SIZES, FitOptions, val_prefix
from ddpilot.trainer.history import History, measured
from ddpilot.trainer.losses import LossSums, Summands, with_count
from ddpilot.trainer.optimizers import own_attributes, relink, restore_attributes
from ddpilot.trainer.ranks import group_here
from ddpilot.trainer.result import FitResult, collect_result
from ddpilot.trainer.run import Run, find_inner, trained_parts
from ddpilot.training.batches import LimitedLoader, Loader, is_at_end
from ddpilot.training.coordination.stop import StopSignals
from ddpilot.training.interval import EACH_EPOCH, EACH_UPDATE
from ddpilot.training.learning_rate import LearningRateSearch, joint_mean, sweep
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.models.sharding import is_sharded
from ddpilot.training.models.shards import has_shards
from ddpilot.training.resume.position import describe_data
from ddpilot.training.step.accumulation_schedule import AccumulationSchedule
from ddpilot.training.step.averaging import WeightAverage

_REASONS = {"SIGINT": "interrupted", "time": "`max_time_s` has elapsed", "asked": "a callback requested it"}


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
        return _fit_by(loop, trainer, fit)
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
        for _ in range(2):  # the second one loads the checkpoint of the first one
            trial = copy_trainer(trainer)
            fit_here(trial, short, signals)
    finally:
        restore_rng(rng, group.device)
        if group.is_rank_zero:
            shutil.rmtree(str(folder), ignore_errors=True)
    if group.is_rank_zero:
        what = f"{trial.position.num_updates} updates{', a validation' * (fit.val_set is not None)}, a save and a load"
        sys.stdout.write(f"dry run: {what} in {time.perf_counter() - began_s:.1f} s; nothing was kept\n")
        sys.stdout.flush()


def copy_trainer(trainer: TrainerCore) -> TrainerCore:
    """Return a trainer before its first update, without callbacks, with copies of everything that a fit changes."""
    names = ("model", "loss_fn", "optimizers", "schedulers", "ema", "metrics")
    own = own_attributes(trainer.optimizers)
    parts, own = copy.deepcopy(({name: getattr(trainer, name) for name in names}, own))
    restore_attributes(parts["optimizers"], own)
    trial = copy.copy(trainer)
    vars(trial).update(parts, callbacks=[], history=History(), position=Position(), findings=())
    return trial


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
    train_loader, val_loaders = _limited(_make_loaders(fit, loop), fit)
    data = describe_data(train_loader)
    trainer.batch_size = getattr(getattr(train_loader, "plan", None), "global_batch_size", None) or trainer.batch_size
    _start(loop, trainer.position, data)
    run, state = _prepare(trainer, loop, fit)
    _resume(loop, run, fit)
    callbacks = CallbackRunner(trainer.callbacks, run)
    here = _Fit(trainer, run, state, (train_loader, val_loaders), callbacks, fit)
    try:
        callbacks.call("on_fit_start")
        if fit.validate_first and not run.update:
            here.validate_first()
        with callbacks.around_steps():
            for _ in loop.epochs(run.num_epochs, max_updates=run.max_updates):
                here.train_epoch()
        here.finish_average()
        callbacks.is_over = True
        callbacks.call("on_fit_end")
    except BaseException as error:
        callbacks.call_exception(error)
        raise
    _report_stop(loop)
    trainer.explanation = loop.explain()
    trainer.position = Position(loop.epoch, loop.next_batch, loop.num_updates, data)
    trainer.findings = loop.findings
    return callbacks.late_error


def _start(loop: Loop, position: Position, data: Mapping[str, Any]) -> None:
    epoch, next_batch = position.epoch, position.next_batch
    if next_batch and position.data != data:  # with different data there is no rest of the epoch: the next epoch starts
        _report_skipped_rest(loop, position, data)
        epoch, next_batch = epoch + 1, 0
    loop.start_at(epoch, next_batch=next_batch, num_updates=position.num_updates)


def _report_skipped_rest(loop: Loop, position: Position, data: Mapping[str, Any]) -> None:
    before, epoch = position.data, position.epoch
    names = [name for name in ("dataset_length", "global_batch_size") if before.get(name) != data.get(name)]
    changed = ", ".join(f"{name} {before.get(name)} -> {data.get(name)}" for name in names) or "their order"
    loop.print(
        f"skipping the rest of epoch {epoch} (from batch {position.next_batch}), as the training data changed "
        f"({changed}): starting epoch {epoch + 1}",
        flush=True,
    )


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


def _prepare(trainer: TrainerCore, loop: Loop, fit: FitOptions) -> tuple[Run, FitState]:
    model, options = trainer.model, dict(fit.ddp)
    shard = options.pop("shard", None)
    parts = trained_parts(model) or {"": model}
    if shard not in (None, "optimizer"):
        check_sharded(trainer.callbacks)
        options["shard"], shard = shard, None
    wrapped = [  # sharded by an earlier fit on these ranks
        loop.prepare(part) if is_sharded(part) else loop.prepare(part, **options) for part in parts.values()
    ]
    for name, optimizer in trainer.optimizers.items():
        if not isinstance(optimizer, ShardedState):  # divided by an earlier fit on these ranks
            move_optimizer_state(optimizer)
            trainer.optimizers[name] = loop.prepare(optimizer, shard=shard)
        else:
            loop.prepare(optimizer)
    for name, scheduler in trainer.schedulers.items():
        relink(scheduler, trainer.optimizers[name])
        loop.prepare(scheduler)
    if trainer.ema is not None:
        loop.prepare(trainer.ema)
    state = FitState(trainer.history, trainer.callbacks)
    loop.track(story=state)  # the name of its entry in checkpoints
    run = Run(
        loop=loop,
        model=unwrap(wrapped[0]) if "" in parts else model,
        wrapped=wrapped[0] if "" in parts else dict(zip(parts, wrapped, strict=True)),
        optimizers=trainer.optimizers,
        schedulers={
            name: one
            for name, one in trainer.schedulers.items()
            if trainer.scheduler_every == EACH_UPDATE and not isinstance(one, ReduceLROnPlateau)
        },
        ema=trainer.ema,
        history=trainer.history,
        num_epochs=fit.num_epochs(loop.epoch),
        until_epoch=fit.num_epochs(0) if fit.is_total else None,
        max_updates=fit.max_updates,
        validate_every=fit.validate_every,
    )
    return run, state


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move optimizer state left by an earlier fit to the device of the parameters."""
    first = optimizer.param_groups[0]["params"][0]
    if optimizer.state and first.device.type != "cpu":
        optimizer.load_state_dict(optimizer.state_dict())


def find_learning_rate_here(
    trainer: TrainerCore, fit: FitOptions, min_lr: float, max_lr: float, num_updates: int
) -> LearningRateSearch:
    """Implement `Trainer.find_learning_rate`, on a copy of the trainer. Collective."""
    group = group_here()
    rng = capture_rng(group.device)
    try:
        trial = copy_trainer(trainer)
        loop = Loop(trainer.seed, accumulate=trainer.accumulate, precision=trainer.precision, group=group).trial()
        run, _ = _prepare(trial, loop, fit)
        run.schedulers = {}

        def train_batch(batch: Any) -> tuple[float, float]:
            returned = trial.train_batch(run, batch)
            named = returned if isinstance(returned, Mapping) else {"loss": returned}
            means = [joint_mean(loop, *with_count(loss)) for loss in named.values()]
            if not isinstance(returned, Summands):
                return means[0]
            assert loop.batch is not None  # inside `batches`
            return sum(mean for mean, _ in means), float(loop.batch.global_count)

        loader, _ = _make_loaders(fit, loop)
        found = sweep(loop, loader, run.optimizer, train_batch, min_lr, max_lr, num_updates)
    finally:
        restore_rng(rng, group.device)
    loop.print(found)
    return found


_OF_VALIDATION = (*SIZES, "collate_fn", *WORKER_OPTIONS)
"""Options that the loader of a validation set has from that of the training data."""


def _make_loaders(fit: FitOptions, loop: Loop) -> tuple[Loader, dict[str, Loader]]:
    """Return the loader of the training data, and those of the validation sets by name."""
    train = make_loader_of(fit.train_set, loop, fit.loader)
    options = {name: value for name, value in fit.loader.items() if name in _OF_VALIDATION}
    if isinstance(fit.train_set, DataLoader):
        options |= {"global_batch_size": fit.train_set.batch_size, "batch_size_per_rank": None}
    val = {
        name: make_loader_of(data, loop, {} if isinstance(data, DataLoader) else options)
        for name, data in fit.val_sets.items()
    }
    return train, val


def _limited(loaders: tuple[Loader, dict[str, Loader]], fit: FitOptions) -> tuple[Loader, dict[str, Loader]]:
    (train, val), limits = loaders, fit.limit_batches
    if fit.overfit_batches is not None:
        train = LimitedLoader(train, fit.overfit_batches, is_fixed=True)
    if "train" in limits:
        train = LimitedLoader(train, limits["train"])
    if "validation" in limits:
        val = {name: LimitedLoader(one, limits["validation"]) for name, one in val.items()}
    return train, val


class _Fit:
    """Trains the epochs of one fit on this rank, and records what they measure. All methods are collective."""

    def __init__(
        self,
        trainer: TrainerCore,
        run: Run,
        state: FitState,
        loaders: tuple[Loader, dict[str, Loader]],
        callbacks: CallbackRunner,
        fit: FitOptions,
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._loop = run.loop
        self._state = state
        self._train, self._val = loaders
        self._callbacks = callbacks
        self._fit = fit
        self._finished_at = (-1, -1)
        """The numbers of updates and of averaged weights of which `finish_average` has computed the statistics."""
        self._is_recorded = False
        """True if the epoch, or the part of it in which the fit ends, is in the history."""
        self._interval_numbers: tuple[int, dict[str, float]] = (-1, {})
        """The number of updates at the end of the last interval, and its losses and metrics."""

    def validate_first(self) -> None:
        """Validate before the first update."""
        run = self._run
        run.metrics = {"epoch": run.epoch, "update": 0}
        self._evaluate()
        run.history.first.update(run.metrics)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in measured(run.metrics).items())
        self._print(f"before the first update: {numbers}")

    def train_epoch(self) -> None:
        """Train and validate one epoch, up to the end of the fit or a stop."""
        run = self._run
        run.metrics = {}
        self._is_recorded = False
        self._callbacks.call("on_epoch_start")
        _report_untrained(run)
        losses = self._state.begin_epoch(self._loop)
        for batch in self._loop.batches(self._train):
            before = self._loop.num_updates
            run.batch = batch
            self._callbacks.call_in_batch("on_batch_start")
            run.loss = losses.add(self._trainer.train_batch(run, run.batch))
            self._callbacks.call_in_batch("on_batch_end")
            if self._loop.num_updates > before:
                self._after_update(before)
        run.batch = None
        if not self._is_recorded:
            self._callbacks.raise_failure()
            self._end_epoch(is_part=bool(self._loop.next_batch))

    def _after_update(self, before: int) -> None:
        """Do what is due after an update, of which there were `before` before it."""
        run, loop, now = self._run, self._loop, self._loop.num_updates
        if run.ema is not None:
            if isinstance(run.ema, WeightAverage):
                run.ema.after_update(run.model, before, now, loop.epoch)
            else:
                run.ema.update_parameters(run.model)
        self._step_schedulers("updates", before, now)
        self._callbacks.call_in_batch("on_update_end")
        is_due = run.validate_every.counts_updates and run.validate_every.is_due(before, now)
        if not is_due and not self._has_all_updates:
            return
        assert loop.batch is not None  # inside `batches`
        is_at_end_of_epoch = is_at_end(self._train, loop.batch)
        if is_at_end_of_epoch and not is_due:
            return  # the end of the epoch does the same
        self._callbacks.raise_failure()
        self._callbacks.is_over = self._is_last(is_part=not is_at_end_of_epoch)
        if run.validate_every.counts_updates:
            self._end_interval()
        loop.exchange_stop()
        # After a signal or `max_time_s` the epoch continues in a later run, whose row is of all of it.
        is_intended = self._has_all_updates or loop.stop_reasons == ("asked",)
        if is_intended and not is_at_end_of_epoch:
            self._end_epoch(is_part=True)
            return
        if not is_at_end_of_epoch:
            self._save(self._interval_numbers[1])
        self._state.restart_clock()
        run.metrics = {}

    @property
    def _has_all_updates(self) -> bool:
        return self._run.max_updates is not None and self._loop.num_updates >= self._run.max_updates

    def _is_last(self, *, is_part: bool) -> bool:
        """True if the fit ends here: after the last update or epoch, or by a stop."""
        num_epochs = self._run.num_epochs
        is_last_epoch = num_epochs is not None and not is_part and self._loop.epoch + 1 >= num_epochs
        return self._loop.should_stop or self._has_all_updates or is_last_epoch

    def _end_interval(self) -> None:
        """Record the interval of `validate_every` updates that ends here, and validate."""
        run = self._run
        self._state.take(ends_interval=True)
        run.metrics = self._row(self._state.end_interval())
        run.skips_validation = False
        self._evaluate()
        self._step_plateau()
        run.history.intervals.append(run.metrics)
        self._callbacks.call("on_interval_end")
        self._interval_numbers = self._loop.num_updates, _numbers(run)
        self._print(render_interval(run.metrics, run.max_updates))

    def _end_epoch(self, *, is_part: bool) -> None:
        """Record the epoch, or the part of it in which the fit ends, and validate if epochs are validated."""
        run, loop = self._run, self._loop
        by_updates = run.validate_every.counts_updates
        if not is_part and isinstance(run.ema, WeightAverage):
            run.ema.after_epoch(run.model, run.update, loop.epoch + 1)
        self._callbacks.is_over = self._is_last(is_part=is_part)
        self._state.take()
        if by_updates and self._state.interval.num_samples and self._callbacks.is_over:
            self._end_last_interval(is_part)
        elif not by_updates:
            self._state.end_interval()
        run.metrics = self._row(self._state.end_epoch(), has_logged=not by_updates)
        written = run.history.epochs
        if not run.metrics["samples"] and written and written[-1]["epoch"] == loop.epoch:
            run.metrics |= (
                written.pop()
            )  # resumed after the epoch's last batch: complete the row written before the stop
        is_due = not by_updates and (self._callbacks.is_over or run.validate_every.is_due(loop.epoch, loop.epoch + 1))
        run.skips_validation = bool(self._val) and not is_due
        if is_due and (not is_part or self._has_all_updates):  # not after a stop in the middle of the epoch
            self._evaluate()
        if not is_part:
            self._step_plateau(by_updates=False)
            self._step_schedulers("epochs", loop.epoch, loop.epoch + 1)
        run.history.epochs.append(run.metrics)
        self._callbacks.call("on_epoch_end")
        if not is_part or loop.batch is not None:
            self._save(self._numbers_of_epoch())
        self._is_recorded = True
        self._print(render_row(run.metrics, run.num_epochs))

    def _end_last_interval(self, is_part: bool) -> None:
        """End the interval with the fit: with a validation, but for a stop in the middle of an epoch."""
        if not is_part or self._has_all_updates:
            self._end_interval()
        else:
            self._run.history.intervals.append(self._row(self._state.end_interval()))

    def _row(self, sums: LossSums, *, has_logged: bool = True) -> dict[str, Any]:
        """Return a row of the history; `has_logged`: with what was logged since the last one."""
        run = self._run
        logged = self._loop.take_logged() if has_logged else {}
        row = {"epoch": run.epoch, "update": run.update, **sums.means()}
        row |= {"lr": float(run.optimizer.param_groups[0]["lr"]), "samples": sums.num_samples}
        row |= {"seconds": sums.seconds, "samples_per_s": sums.num_samples / sums.seconds}
        return {**row, **{name: value for name, value in logged.items() if name not in row}}

    def _evaluate(self) -> None:
        """Add the results of the validation sets to the row, if there are any."""
        run, trainer, loop = self._run, self._trainer, self._loop
        if self._callbacks.is_over:
            self.finish_average()
        if not self._val:
            return
        model = find_inner(run.evaluated)
        values: dict[str, Any] = {}
        for name, loader in self._val.items():
            results = trainer.measure(loop, model, loader)
            values |= {f"{val_prefix(name)}{metric}": value for metric, value in results.items()}
        run.metrics |= values
        loop.progress.show(**measured(values))
        self._callbacks.call("on_evaluate_end")

    def finish_average(self) -> None:
        """At the end of the fit, compute the average's BatchNorm statistics; before its start it is the model."""
        average, loop = self._run.ema, self._loop
        if not isinstance(average, WeightAverage):
            return
        average.follow(self._run.model)
        state = loop.num_updates, int(average.n_averaged.item())
        if self._finished_at == state or not average.needs_batch_norm or not average.has_begun:
            return
        self._finished_at = state
        if set(loop.stop_reasons) - {"asked"}:
            why = ", ".join(loop.stop_reasons)
            loop.print(
                f"ddpilot: stopped ({why}) before the BatchNorm statistics of the average are computed", flush=True
            )
            return
        limit, own = average.options.batch_norm_batches, self._trainer.has_own_forward
        forward = (lambda model, batch: self._trainer.forward(model, batch)[0]) if own else None
        # A loader of its own, since the fit may end within a pass over the other one.
        train, _ = _limited(_make_loaders(self._fit, loop), self._fit)
        loop.update_batch_norm(average, train, max_batches=limit, forward=forward)

    def _numbers_of_epoch(self) -> dict[str, float]:
        """Return the losses and metrics for the checkpoint at the end of an epoch."""
        run, name = self._run, str(self._fit.checkpoints.get("best") or "").partition(" ")[2].strip()
        if run.validate_every.counts_updates:
            update, numbers = self._interval_numbers
            return numbers if update == run.update else {**_numbers(run), name: math.nan}
        # An epoch without validation cannot be the best one, and its missing metric is not an error.
        return {name: math.nan, **_numbers(run)} if run.skips_validation and name.startswith("val_") else _numbers(run)

    def _save(self, numbers: Mapping[str, float]) -> None:
        """Save a checkpoint here; with `save_every` only if it may be the best one, as the loop saves the others."""
        options = self._fit.checkpoints
        is_best_possible = options.get("best") is not None and not self._run.skips_validation
        if self._fit.checkpoint_dir is not None and (options.get("save_every") is None or is_best_possible):
            self._loop.save({name: value for name, value in numbers.items() if name})

    def _step_plateau(self, *, by_updates: bool = True) -> None:
        """Step each ReduceLROnPlateau after a validation; `by_updates`: by the interval that ended, else the epoch."""
        run = self._run
        if run.skips_validation or run.validate_every.counts_updates != by_updates:
            return
        for scheduler in self._trainer.schedulers.values():
            name = f"{val_prefix(next(iter(self._val), ''))}loss"
            monitored = run.metrics.get(name, run.metrics.get("loss"))
            if isinstance(scheduler, ReduceLROnPlateau) and monitored is not None and not math.isnan(monitored):
                scheduler.step(monitored)

    def _step_schedulers(self, unit: str, before: int, now: int) -> None:
        """Step the schedulers with an interval of `unit` that is due; those of each update step with the optimizer."""
        every = self._trainer.scheduler_every
        if every.unit != unit or every == EACH_UPDATE or not every.is_due(before, now):
            return
        for scheduler in self._trainer.schedulers.values():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def _print(self, text: str) -> None:
        if self._fit.progress is not False:
            self._loop.print(text, flush=True)


def _numbers(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.metrics.items() if isinstance(value, int | float)}


def _report_untrained(run: Run) -> None:
    """Report trainable parameters that no optimizer holds: frozen when it was created, and unfrozen since."""
    if any(isinstance(one, ShardedState) for one in run.optimizers.values()):  # it holds parameters in its own way
        return
    held = {id(p) for one in run.optimizers.values() for group in one.param_groups for p in group["params"]}
    left = [name for name, p in run.model.named_parameters() if p.requires_grad and id(p) not in held]
    if left and left != run.left_out:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        run.loop.print(
            f"ddpilot: no optimizer has {', '.join(left[:4])}{more}, which are not frozen: they will not be trained. "
            "Pass them to the optimizer, or freeze them.",
            flush=True,
        )
    run.left_out = left


def render_row(row: dict[str, Any], num_epochs: int | None) -> str:
    """Format a row of an epoch: "epoch 0 (1 of 3): loss 0.4321, val_accuracy 0.9 (1.2 s)"."""
    total = "" if num_epochs is None else f" ({row['epoch'] + 1} of {num_epochs})"
    return f"epoch {row['epoch']}{total}: {_render_numbers(row)}"


def render_interval(row: dict[str, Any], max_updates: int | None) -> str:
    """Format a row of an interval: "update 500 of 50000 (epoch 0): loss 0.4321, val_accuracy 0.9 (1.2 s)"."""
    total = "" if max_updates is None else f" of {max_updates}"
    return f"update {row['update']}{total} (epoch {row['epoch']}): {_render_numbers(row)}"


def _render_numbers(row: dict[str, Any]) -> str:
    numbers = [f"{name} {value:.4g}" for name, value in measured(row).items()]
    return f"{', '.join(numbers)} ({row['seconds']:.1f} s)"


def _report_stop(loop: Loop) -> None:
    if loop.should_stop:
        where = f" in the middle of epoch {loop.epoch}" if loop.next_batch else ""
        why = ", ".join(_REASONS.get(reason, reason) for reason in loop.stop_reasons)
        loop.print(f"stopped after update {loop.num_updates}{where} ({why})", flush=True)


def make_loader_of(data: Any, loop: Loop, options: Mapping[str, Any]) -> Loader:
    """Return this rank's loader of `data`. Not collective. Raises DataError and LoopError.

    `options`: those of `LoaderOptions`, with a batch size for a dataset; a DataLoader has its own, and its own workers
    and order.
    """
    if hasattr(data, "iterate"):
        made: Loader = data
        return made
    if isinstance(data, DataLoader):
        return loop.prepare_data_loader(data, **_options_of_loader(data, options))
    is_stream = isinstance(data, IterableDataset) and not is_dataset_of_shards(data)
    return loop.loader(data, **{name: one for name, one in options.items() if not is_stream or name != "shuffle"})


def _options_of_loader(data: DataLoader[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: size for name in SIZES if (size := options.get(name)) is not None}
    for name, size in given.items():
        if size != data.batch_size:
            raise LoopError(
                "preparing a DataLoader",
                found=f"`{name}={size}`, and the loader has `batch_size={data.batch_size}`",
                fix=f"Leave `{name}` out, or give the dataset instead of the loader.",
            )
    kept = {name: value for name, value in options.items() if name not in ("shuffle", "num_workers", *SIZES)}
    return {**kept, "batch_size_per_rank": "batch_size_per_rank" in given}
