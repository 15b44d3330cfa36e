# SPDX-License-Identifier: Apache-2.0
"""`FitEpochs`: what happens after each update, interval and epoch of a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot.trainer.callback import CallbackRunner
from ddpilot.trainer.core import FitState, Position, TrainerCore
from ddpilot.trainer.fit.preparation import limit_loaders, make_loaders
from ddpilot.trainer.fit_options import FitOptions, val_prefix
from ddpilot.trainer.history import measured
from ddpilot.trainer.losses import LossSums
from ddpilot.trainer.run import Run, find_inner
from ddpilot.training.batch_groups import Loader, is_at_end
from ddpilot.training.loop import Loop
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.models.registry import parameters_of
from ddpilot.training.options import EACH_UPDATE
from ddpilot.training.step.weight_averages import WeightAverage


class FitEpochs:
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
        report_untrained(run)
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
        if self._is_complete(is_part=True) and not is_at_end_of_epoch:
            self._end_epoch(is_part=True)
            return
        if not is_at_end_of_epoch:
            self._save(self._interval_numbers[1])
        self._state.restart_clock()
        run.metrics = {}

    @property
    def _has_all_updates(self) -> bool:
        return self._run.max_updates is not None and self._loop.num_updates >= self._run.max_updates

    def _is_complete(self, *, is_part: bool) -> bool:
        """True if the training ends here: after the last update or epoch, or by `Run.stop`.

        After a signal or `max_time_s` it continues in a later run, which measures what this one has not finished.
        """
        num_epochs = self._run.num_epochs
        is_last_epoch = num_epochs is not None and not is_part and self._loop.epoch + 1 >= num_epochs
        return self._has_all_updates or is_last_epoch or self._loop.stop_reasons == ("asked",)

    def _is_last(self, *, is_part: bool) -> bool:
        """True if the fit ends here: after the last update or epoch, or by a stop."""
        return self._loop.should_stop or self._is_complete(is_part=is_part)

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
        is_complete = self._is_complete(is_part=is_part)
        is_validated = not is_part or self._has_all_updates  # not after a stop in the middle of the epoch
        self._state.take()
        if by_updates and self._state.interval.num_samples and is_complete and is_validated:
            self._end_interval()
        elif not by_updates:
            self._state.end_interval()
        run.metrics = self._row(self._state.end_epoch(), has_logged=not by_updates)
        written = run.history.epochs
        if not run.metrics["samples"] and written and written[-1]["epoch"] == loop.epoch:
            run.metrics |= (
                written.pop()
            )  # resumed after the epoch's last batch: complete the row written before the stop
        is_due = not by_updates and (is_complete or run.validate_every.is_due(loop.epoch, loop.epoch + 1))
        run.skips_validation = bool(self._val) and not is_due
        if is_due and is_validated:
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

    def end(self) -> None:
        """Record the part of an interval in which a stop ended the fit, after the checkpoint at that point.

        A run that resumes from the checkpoint records all of the interval.
        """
        run = self._run
        if self._is_recorded and run.validate_every.counts_updates and self._state.interval.num_samples:
            row = self._row(self._state.end_interval())
            run.history.intervals.append({**row, "epoch": run.history.epochs[-1]["epoch"]})

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
        train, _ = limit_loaders(make_loaders(self._fit, loop), self._fit)
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


_REASONS = {"SIGINT": "interrupted", "time": "`max_time_s` has elapsed", "asked": "a callback requested it"}


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


def report_stop(loop: Loop) -> None:
    """Report where and why the fit stopped before its end, if it did."""
    if loop.should_stop:
        where = f" in the middle of epoch {loop.epoch}" if loop.next_batch else ""
        why = ", ".join(_REASONS.get(reason, reason) for reason in loop.stop_reasons)
        loop.print(f"stopped after update {loop.num_updates}{where} ({why})", flush=True)


def report_skipped_rest(loop: Loop, position: Position, data: Mapping[str, Any]) -> None:
    """Report that the rest of an epoch is skipped, since the fit has other data than the one before."""
    before, epoch = position.data, position.epoch
    names = [name for name in ("dataset_length", "global_batch_size") if before.get(name) != data.get(name)]
    changed = ", ".join(f"{name} {before.get(name)} -> {data.get(name)}" for name in names) or "their order"
    loop.print(
        f"skipping the rest of epoch {epoch} (from batch {position.next_batch}), as the training data changed "
        f"({changed}): starting epoch {epoch + 1}",
        flush=True,
    )


def report_untrained(run: Run) -> None:
    """Report trainable parameters that no optimizer holds: frozen when it was created, and unfrozen since."""
    if any(isinstance(one, ShardedState) for one in run.optimizers.values()):  # it holds parameters in its own way
        return
    held = {id(p) for one in run.optimizers.values() for p in parameters_of(one)}
    left = [name for name, p in run.model.named_parameters() if p.requires_grad and id(p) not in held]
    if left and left != run.left_out:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        run.loop.print(
            f"ddpilot: no optimizer has {', '.join(left[:4])}{more}, which are not frozen: they will not be trained. "
            "Pass them to the optimizer, or freeze them.",
            flush=True,
        )
    run.left_out = left
