# SPDX-License-Identifier: Apache-2.0
"""`Trainer.fit`: its options, their checks, and the training loop that runs on each rank."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpilot.data.options import WORKER_OPTIONS
from ddpilot.errors import LoopError
from ddpilot.trainer.callback import CallbackRunner
from ddpilot.trainer.checks import check_forward, check_loader_options, check_names, check_whole, is_count, suggest
from ddpilot.trainer.core import FitState, Position, TrainerCore
from ddpilot.trainer.history import BOOKKEEPING, measured
from ddpilot.trainer.optimizers import relink
from ddpilot.trainer.ranks import group_here
from ddpilot.trainer.result import FitResult, collect_result
from ddpilot.trainer.run import Run, find_inner, trained_parts
from ddpilot.training.batches import Loader
from ddpilot.training.coordination.stop import StopSignals
from ddpilot.training.loop import Loop
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.options import CheckpointOptions
from ddpilot.training.resume.position import describe_data

_REASONS = {"SIGINT": "interrupted", "time": "`max_time_s` has elapsed", "asked": "a callback requested it"}
_FITTING = "starting a fit"


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of one `fit`, sent to the ranks."""

    train_set: Any
    val_set: Any
    epochs: int
    until_epoch: int | None
    max_time_s: float | None
    validate_every: int
    checkpoints: Mapping[str, Any]
    """Arguments of `Loop`: `checkpoint_dir`, `resume`, `keep` and so on."""
    other_data: bool
    check_finite: bool
    progress: bool | None
    loader: Mapping[str, Any]
    """Options of the training data's loader."""
    ddp: Mapping[str, Any]


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


def _fit_by(loop: Loop, trainer: TrainerCore, fit: FitOptions) -> Exception | None:
    loop.findings = trainer.findings
    train_loader, val_loader = _make_loaders(fit, loop)
    data = describe_data(train_loader)
    trainer.batch_size = getattr(getattr(train_loader, "plan", None), "global_batch_size", None) or trainer.batch_size
    _start(loop, trainer.position, data)
    run, state = _prepare(trainer, loop, fit)
    if fit.checkpoints["checkpoint_dir"] is not None and fit.checkpoints["resume"]:
        _resume(loop, run, fit)
    callbacks = CallbackRunner(trainer.callbacks, run)
    try:
        callbacks.call("on_fit_start")
        for _ in loop.epochs(run.num_epochs):
            _train_epoch(trainer, run, train_loader, val_loader, callbacks, fit, state)
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
    if not loop.resume(other_data=fit.other_data) or fit.progress is False:
        return
    left = max(0, run.num_epochs - loop.epoch)
    goal = f"until_epoch={fit.until_epoch}" if fit.until_epoch is not None else f"epochs={fit.epochs}"
    loop.print(f"resuming at epoch {loop.epoch}; {goal}: {left} more, up to {run.num_epochs}", flush=True)


def _prepare(trainer: TrainerCore, loop: Loop, fit: FitOptions) -> tuple[Run, FitState]:
    model, options = trainer.model, dict(fit.ddp)
    shard = options.pop("shard", None)
    parts = trained_parts(model) or {"": model}
    wrapped = [loop.prepare(part, **options) for part in parts.values()]
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
        schedulers={name: one for name, one in trainer.schedulers.items() if _is_per_update(trainer, one)},
        ema=trainer.ema,
        history=trainer.history,
        num_epochs=loop.epoch + fit.epochs if fit.until_epoch is None else fit.until_epoch,
        until_epoch=fit.until_epoch,
    )
    return run, state


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move optimizer state left by an earlier fit to the device of the parameters."""
    first = optimizer.param_groups[0]["params"][0]
    if optimizer.state and first.device.type != "cpu":
        optimizer.load_state_dict(optimizer.state_dict())


_SIZES = ("global_batch_size", "batch_size_per_rank")
_OF_VALIDATION = (*_SIZES, "collate_fn", *WORKER_OPTIONS)
"""Options that the loader of a validation set has from that of the training data."""


def _make_loaders(fit: FitOptions, loop: Loop) -> tuple[Loader, Loader | None]:
    train = make_loader_of(fit.train_set, loop, fit.loader)
    if fit.val_set is None:
        return train, None
    options = {name: value for name, value in fit.loader.items() if name in _OF_VALIDATION}
    if isinstance(fit.val_set, DataLoader):
        options = {}
    elif isinstance(fit.train_set, DataLoader):
        options |= {"global_batch_size": fit.train_set.batch_size, "batch_size_per_rank": None}
    return train, make_loader_of(fit.val_set, loop, options)


def _train_epoch(
    trainer: TrainerCore,
    run: Run,
    train: Loader,
    val: Loader | None,
    callbacks: CallbackRunner,
    fit: FitOptions,
    state: FitState,
) -> None:
    loop = run.loop
    run.metrics = {}
    callbacks.call("on_epoch_start")
    _report_untrained(run)
    rows = _train_batches(trainer, run, train, callbacks, state)
    callbacks.is_over = loop.should_stop or (not loop.next_batch and loop.epoch + 1 >= run.num_epochs)
    is_due = callbacks.is_over or (loop.epoch + 1) % fit.validate_every == 0
    run.skips_validation = val is not None and not is_due
    if val is not None and is_due and not loop.next_batch:  # not after a stop in the middle of the epoch
        model = find_inner(run.ema or run.model)
        results = loop.evaluate(model, val, trainer.all_metrics, forward=trainer.forward)
        values = {f"val_{name}": value for name, value in results.items()}
        run.metrics |= values
        loop.progress.show(**measured(values))
        callbacks.call("on_evaluate_end")
    if not loop.next_batch:
        _step_per_epoch(trainer, run)
    run.history.epochs.append(run.metrics)
    run.history.updates.extend(rows)
    callbacks.call("on_epoch_end")
    if fit.checkpoints["checkpoint_dir"] is not None and not loop.next_batch:
        loop.save(_numbers_to_save(run, fit))
    if fit.progress is not False:
        loop.print(render_row(run.metrics, run.num_epochs), flush=True)


def _numbers_to_save(run: Run, fit: FitOptions) -> dict[str, float]:
    numbers = {name: value for name, value in run.metrics.items() if isinstance(value, int | float)}
    name = str(fit.checkpoints.get("best") or "").partition(" ")[2].strip()
    # An epoch without validation cannot be the best one, and its missing metric is not an error.
    return {name: math.nan, **numbers} if run.skips_validation and name.startswith("val_") else numbers


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


def _train_batches(
    trainer: TrainerCore, run: Run, loader: Loader, callbacks: CallbackRunner, state: FitState
) -> list[dict[str, Any]]:
    loop, losses = run.loop, state.begin_epoch(run.loop)
    for batch in loop.batches(loader):
        before = loop.num_updates
        run.loss = losses.add(trainer.train_batch(run, batch))
        if loop.num_updates > before:
            if run.ema is not None:
                run.ema.update_parameters(run.model)
            callbacks.call_update_end()
    callbacks.raise_failure()
    state.end_epoch()
    means, rows = losses.close(loop.num_updates)
    seconds, num_samples = losses.seconds, losses.num_samples
    run.metrics |= {"epoch": loop.epoch, "update": loop.num_updates, **means}
    run.metrics |= {"lr": float(run.optimizer.param_groups[0]["lr"]), "samples": num_samples}
    run.metrics |= {"seconds": seconds, "samples_per_s": num_samples / seconds}
    written = run.history.epochs
    if not num_samples and written and written[-1]["epoch"] == loop.epoch:
        run.metrics |= written.pop()  # resumed after the epoch's last batch: complete the row written before the stop
    return rows


def _step_per_epoch(trainer: TrainerCore, run: Run) -> None:
    for scheduler in trainer.schedulers.values():
        if isinstance(scheduler, ReduceLROnPlateau):
            if run.skips_validation:
                continue
            monitored = run.metrics.get("val_loss", run.metrics.get("loss"))
            if monitored is not None and not math.isnan(monitored):
                scheduler.step(monitored)
        elif not _is_per_update(trainer, scheduler):
            scheduler.step()


def _is_per_update(trainer: TrainerCore, scheduler: Any) -> bool:
    return trainer.scheduler_per == "update" and not isinstance(scheduler, ReduceLROnPlateau)


def render_row(row: dict[str, Any], num_epochs: int) -> str:
    """Format a row of the history: "epoch 0 (1 of 3): loss 0.4321, val_accuracy 0.9 (1.2 s)"."""
    numbers = [f"{name} {value:.4g}" for name, value in measured(row).items()]
    return f"epoch {row['epoch']} ({row['epoch'] + 1} of {num_epochs}): {', '.join(numbers)} ({row['seconds']:.1f} s)"


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
        return loop.shard(data, **_options_of_loader(data, options))
    is_stream = isinstance(data, IterableDataset)
    return loop.loader(data, **{name: one for name, one in options.items() if not is_stream or name != "shuffle"})


def _options_of_loader(data: DataLoader[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: size for name in _SIZES if (size := options.get(name)) is not None}
    for name, size in given.items():
        if size != data.batch_size:
            raise LoopError(
                "sharding a DataLoader",
                found=f"`{name}={size}`, and the loader has `batch_size={data.batch_size}`",
                fix=f"Leave `{name}` out, or give the dataset instead of the loader.",
            )
    kept = {name: value for name, value in options.items() if name not in ("shuffle", "num_workers", *_SIZES)}
    return {**kept, "batch_size_per_rank": "batch_size_per_rank" in given}


def has_size(options: Mapping[str, Any]) -> bool:
    """True if a batch size is among the `options` of a loader."""
    return any(options.get(name) is not None for name in _SIZES)


def check_fit(trainer: TrainerCore, fit: FitOptions) -> None:
    """Raise LoopError for arguments that would fail on every rank, before a rank starts."""
    for name in ("epochs", "until_epoch"):
        number = getattr(fit, name)
        if not (number is None and name == "until_epoch") and (not is_count(number) or number < 0):
            found = f"`{name}` is {number!r}"
            raise LoopError(_FITTING, found=found, fix="Give a whole number of epochs, 0 or more.")
    if fit.train_set is None:
        raise LoopError(_FITTING, found="`train_set` is None", fix="Give a dataset or a DataLoader.")
    for name, data in (("train_set", fit.train_set), ("val_set", fit.val_set)):
        _check_single(name, data)
        _check_samples(name, data)
    check_whole(_FITTING, "`val_set`", fit.val_set)
    if not is_count(fit.validate_every) or fit.validate_every < 1:
        found = f"`validate_every` is {fit.validate_every!r}"
        raise LoopError(_FITTING, found=found, fix="Give a number of epochs, 1 or more.")
    _check_sizes(fit)
    check_loader_options(_FITTING, "`loader`", fit.loader)
    options = [*inspect.signature(Loop.prepare).parameters, *inspect.signature(DistributedDataParallel).parameters]
    check_names(
        _FITTING, "`ddp`", fit.ddp, [name for name in options if name not in ("self", "things", "more", "module")]
    )
    _check_checkpoints(fit)
    _check_step(trainer)
    if not trainer.has_own_step or fit.val_set is not None:
        check_forward(_FITTING, trainer.model, trainer.has_own_forward)
    _check_monitors(trainer, fit)


def _check_single(name: str, data: object) -> None:
    """Raise LoopError for several datasets in a mapping or a sequence."""
    if isinstance(data, Mapping) and data and 0 not in data:
        several = f"a {type(data).__name__} of {', '.join(map(repr, data))}"
    elif isinstance(data, list | tuple) and any(isinstance(one, Dataset | DataLoader) for one in data):
        several = f"a {type(data).__name__} of {len(data)}: {', '.join(type(one).__name__ for one in data[:4])}"
    else:
        return
    fix = "Give one dataset; torch.utils.data.ConcatDataset joins several."
    if name == "val_set":
        fix += " After the fit, trainer.evaluate(data) evaluates a different one."
    raise LoopError(_FITTING, found=f"`{name}` is {several}, and a fit takes one dataset", fix=fix)


def _check_samples(name: str, data: object) -> None:
    """Raise LoopError for an empty dataset, as its mean loss would be NaN."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and not len(dataset):
        found = f"`{name}` is empty: a {type(dataset).__name__} of 0 samples"
        fix = "Check where its samples come from." + " `val_set` is optional." * (name == "val_set")
        raise LoopError(_FITTING, found=found, fix=fix)


def check_goal(epochs: int | None, until_epoch: int | None) -> None:
    """Raise LoopError if both are given: the number of further epochs and the total."""
    if epochs is not None and until_epoch is not None:
        found = f"`epochs={epochs!r}`, a number of further epochs, and `until_epoch={until_epoch!r}`, a total"
        raise LoopError(_FITTING, found=found, fix="Give one of the two.")


def _check_sizes(fit: FitOptions) -> None:
    if isinstance(fit.train_set, DataLoader) or hasattr(fit.train_set, "iterate"):
        return
    given = [name for name in _SIZES if fit.loader.get(name) is not None]
    if len(given) != 1:
        found = f"{' and '.join(map(repr, given)) or 'no batch size'}, and a {type(fit.train_set).__name__}"
        fix = "Give `global_batch_size`, the samples of all ranks together, or `batch_size_per_rank`."
        raise LoopError(_FITTING, found=found, fix=fix)


def _check_checkpoints(fit: FitOptions) -> None:
    options = fit.checkpoints
    known = [field.name for field in dataclasses.fields(CheckpointOptions)]
    check_names(_FITTING, "`checkpoints`", options, known)
    more = [name for name in options if name not in ("checkpoint_dir", "resume")]
    if more and options["checkpoint_dir"] is None:
        found = f"`checkpoints` with {', '.join(map(repr, more))}, and no `checkpoint_dir`: nothing would be saved"
        raise LoopError(_FITTING, found=found, fix="Give a `checkpoint_dir`.")


def _check_step(trainer: TrainerCore) -> None:
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        found = "all parameters of the model are frozen, so there is nothing to train"
        raise LoopError(_FITTING, found=found, fix='Unfreeze some: `ddpilot.unfreeze(model, "head")`.')
    if trainer.has_own_step:
        return
    if trainer.loss_fn is None:
        raise LoopError(_FITTING, found="no `loss_fn`", fix="Give one, or override `train_batch`.")
    for optimizer in trainer.optimizers.values():
        if isinstance(optimizer, LBFGS):
            found = "LBFGS, whose step calls the model several times"
            raise LoopError(_FITTING, found=found, fix="Use a different optimizer, or override `train_batch`.")


def _check_monitors(trainer: TrainerCore, fit: FitOptions) -> None:
    """Check monitored names against the columns of the history, unless user code may add columns."""
    if trainer.has_own_step or any(not type(one).__module__.startswith("ddpilot.") for one in trainer.callbacks):
        return
    validation = [] if fit.val_set is None else [f"val_{name}" for name in trainer.all_metrics]
    known = ["loss", *validation, *BOOKKEEPING]
    best = str(fit.checkpoints.get("best") or "").split()
    monitored = [("`checkpoints` with best", best[1])] if len(best) == 2 else []
    for callback in trainer.callbacks:
        if isinstance(name := getattr(callback, "monitor", None), str):
            monitored.append((type(callback).__name__, name))
    for source, name in monitored:
        if name not in known and name.split(".")[0] not in known:
            needs = " There is no `val_set`." if name.startswith("val_") and fit.val_set is None else ""
            found = f"{source} monitors {name!r}, which no epoch will have"
            raise LoopError(_FITTING, found=found, fix=suggest(name, known) + needs)
