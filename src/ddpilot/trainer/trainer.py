# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: its methods, and the functions that run them on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpilot.data.options import LoaderOptions
from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors, fork_rng, move
from ddpilot.trainer.checks import check_choice, check_forward, check_loader_options, check_whole
from ddpilot.trainer.core import TrainerCore
from ddpilot.trainer.fit.fit import fit_here, fit_on_rank
from ddpilot.trainer.fit.preparation import (
    copy_trainer,
    make_loader_of,
    make_loaders,
    move_optimizer_state,
    prepare_fit,
)
from ddpilot.trainer.fit_options import (
    FitOptions,
    check_fit,
    check_goal,
    check_monitors,
    has_size,
    read_limits,
    read_save_every,
    read_validate_every,
)
from ddpilot.trainer.history import History
from ddpilot.trainer.losses import Summands, with_count
from ddpilot.trainer.ranks import (
    group_here,
    is_on_ranks,
    load_state,
    report_ignored_ranks,
    rollback_on_error,
    run_on_ranks,
    run_once,
    unpack_late_error,
)
from ddpilot.trainer.run import Forward, call_model, find_inner
from ddpilot.training.batch_groups import Loader
from ddpilot.training.batch_size import BatchSizeSearch, check_search, find_batch_size
from ddpilot.training.coordination.stop import StopSignals
from ddpilot.training.device_placement import ensure_on_device
from ddpilot.training.evaluation.evaluate import predict_batch
from ddpilot.training.learning_rate import LearningRateSearch, check_range, joint_mean, sweep
from ddpilot.training.loop import Loop
from ddpilot.training.loss_weights import add_losses
from ddpilot.training.models.ddp import DDPOptions
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.options import CheckpointOptions, keywords_of, naming_arguments
from ddpilot.training.step.precision import Precision

_WHICH_SIZE = "Give `global_batch_size`, the samples of all ranks together, or `batch_size_per_rank`."


class Trainer(TrainerCore):
    """A complete training loop built on `Loop`, with the model and what defines an update.

    - `model`: a module on the CPU, or a ModuleDict of several.
    - `loss_fn(output, target)`: returns this rank's mean loss, or (mean loss, number of items in the mean, such as
      tokens).
    - `optimizer`: an optimizer of the model's parameters, or a function that makes one of them. Or a mapping from names
      of submodules to these; all of them step with each update.
    - `metrics`: as for `Loop.evaluate`.
    - `callbacks`: a sequence of `Callback`s.
    - `forward(model, batch) -> (output, target)`: computes the arguments of loss, metrics and predictions. None: a
      batch is `(x, y)`, or a mapping of the model's keyword arguments.
    - `scheduler`, `scheduler_per`: a scheduler, or a function that makes one of the optimizer. It steps with each
      "update", each "epoch", or every "100 updates" or "2 epochs". A ReduceLROnPlateau always steps with each
      validation, by its loss.
    - `ema`: decay of a moving average of the weights, which evaluations and predictions use. `average`: an `Averaging`
      instead, for SWA and others.
    - `clip_norm`, `clip_norm_type`: maximum norm of the gradients, and its type (1, 2, inf). `clip_value`: maximum
      absolute value of their elements.
    - `clip_per`: "group" clips each parameter group of the optimizers separately. A group may have its own `clip_norm`
      or `clip_value`.
    - `seed`, `accumulate`, `precision`: as for `Loop`. `compile`: as for `Loop.prepare`, in fits.
    - `closure`: True for optimizers that compute the loss several times per update by `step(closure)` (SAM). None: only
      for those whose `step` requires a closure (LBFGS).
    - `launcher`: a `Launcher` with the options for starting ranks.

    Override `train_batch` for a different training step, and `validate_batch` for a different validation step. Raises
    LoopError for an optimizer with other parameters than the model's.
    """

    @naming_arguments("starting a fit", {"batch_size": _WHICH_SIZE})
    def fit(
        self,
        train_set: Any,
        val_set: Any = None,
        *,
        epochs: int | None = None,
        until_epoch: int | None = None,
        max_updates: int | None = None,
        global_batch_size: int | None = None,
        batch_size_per_rank: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        nproc_per_node: int | str | None = None,
        max_time_s: float | None = None,
        limit_batches: int | Mapping[str, int] | None = None,
        overfit_batches: int | None = None,
        validate_first: bool = False,
        dry_run: bool = False,
        validate_every: int | str | None = None,
        save_every: int | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = True,
        other_data: bool = False,
        checkpoints: CheckpointOptions | Mapping[str, Any] | None = None,
        check_finite: bool = True,
        progress: bool | None = None,
        loader: LoaderOptions | Mapping[str, Any] | None = None,
        ddp: DDPOptions | Mapping[str, Any] | None = None,
    ) -> History:
        """Train for `epochs` more epochs (default 1), or until a total, and return `history`.

        On a rank (of torchrun, Slurm, `launch`, a session) it is collective and trains in place. In any other process
        it starts `nproc_per_node` ranks, and sends them the trainer and the data. Afterwards it loads weights,
        optimizer state, history and the callbacks' states into the objects of this process, in place, without using a
        GPU here.

        How long, and where:

        - `epochs`: number of further epochs; with a `checkpoint_dir`, the total over all fits, so that a repeated call
          does not train further.
        - `until_epoch`, `max_updates`: total number of epochs or updates over all fits. `max_updates` may end within an
          epoch, for a long or endless stream.
        - `max_time_s`: seconds after which all ranks stop together; None: no limit.
        - `nproc_per_node`: number of ranks; 0 trains in this process. None: the number of the last fit, and in the
          first fit that of `launcher`, by default one per accelerator, or one.

        Data:

        - `train_set`, `val_set`: datasets, with `global_batch_size` or `batch_size_per_rank`, or DataLoaders, with
          their own batch size. Several validation sets are passed as a dict: `{"clean": a, "noisy": b}` records
          "val_clean_loss" and so on.
        - `limit_batches`: number of global batches of each epoch and each validation to use, or {"train": 100,
          "validation": 10}.
        - `overfit_batches`: each epoch consists of this number of batches of epoch 0, to see if the model can fit them.
        - `loader`, `ddp`: further options of `Loop.loader` for the training data, and of `Loop.prepare`.

        Validation and checkpoints:

        - `validate_every`: "500 updates" or "2 epochs" between validations, counted over all fits; an int counts
          updates with `max_updates`, otherwise epochs. Default: 1 epoch. The end of the fit is validated too, except
          after a signal or `max_time_s`, when a later fit continues. With updates, `history.intervals` has a row for
          each validation.
        - `validate_first`: also validate before the first update of the training, into `history.first`.
        - `save_every`: the interval between checkpoints, in the same form; an int counts updates. Default: one after
          each row of the history.
        - `checkpoint_dir`, `resume`, `check_finite`: as for `Loop`. Training resumes from the latest checkpoint if it
          is further than this trainer.
        - `other_data`: resume also at the start of an epoch with a dataset of a different length.
        - `checkpoints`: the other options for checkpoints; `best` names a column of the history, "max val_acc".
        - `dry_run`: try everything where the fit would run: two updates, two batches of validation, a save and a load,
          without callbacks. It changes nothing and leaves no file.
        - `progress`: False shows neither a bar nor a line per epoch.

        After Ctrl-C, `max_time_s` seconds or a callback's stop, all ranks stop after the same update, within about 0.1
        s (see `Run.stop`), and `fit` returns. The next fit on the same data resumes there.

        Raises LoopError for invalid arguments, before any rank starts. Raises RankError if a rank fails, and with
        `nproc_per_node=0` the original exception; everything in this process is then unchanged. On an existing rank, an
        exception leaves the updates made so far in place. If a callback on rank 0 fails after the last update, its
        error is raised after the trained state was loaded.
        """
        check_goal(epochs, until_epoch, max_updates)
        saving = {"checkpoint_dir": checkpoint_dir, "resume": resume, **keywords_of(checkpoints)}
        sizes = {"global_batch_size": global_batch_size, "batch_size_per_rank": batch_size_per_rank}
        goal = {"epochs": epochs, "until_epoch": until_epoch, "max_updates": max_updates}
        trial = {"overfit_batches": overfit_batches, "validate_first": validate_first, "dry_run": dry_run}
        run: dict[str, Any] = {"max_time_s": max_time_s, "check_finite": check_finite, "progress": progress}
        fit = FitOptions(
            train_set=train_set,
            val_set=val_set,
            limit_batches=read_limits(limit_batches),
            validate_every=read_validate_every(validate_every, max_updates),
            checkpoints=saving if save_every is None else {**saving, "save_every": read_save_every(save_every)},
            loader={**sizes, "shuffle": shuffle, "num_workers": num_workers, **keywords_of(loader)},
            ddp=keywords_of(ddp),
            **{**goal, **trial, **run, "other_data": other_data},
        )
        check_fit(self, fit)
        check_monitors(self, fit)
        if (late_error := self._run_fit(fit, nproc_per_node)) is not None:
            raise late_error
        return self.history

    def _run_fit(self, fit: FitOptions, nproc_per_node: int | str | None) -> Exception | None:
        """Run `fit` on the existing ranks, in this process or on new ranks; returns a callback's late error."""
        if is_on_ranks():
            report_ignored_ranks(nproc_per_node)
            with StopSignals() as signals:
                return fit_here(self, fit, signals)
        if nproc_per_node == 0:
            with StopSignals() as signals, rollback_on_error(self):
                return fit_here(self, fit, signals)
        self.nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        results = run_on_ranks(self, self.nproc_per_node, "fit", fit_on_rank, fit)
        if fit.dry_run:
            return None
        load_state(self, results[0].state)
        late_error = results[0].late_error
        return None if late_error is None else unpack_late_error(late_error, len(results))

    def evaluate(
        self,
        dataset: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        forward: Forward | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the loss and each metric over all samples of `dataset`, each counted once.

        Runs in this process and moves the model to the device. With `nproc_per_node`, it runs on ranks that are started
        for it. On an existing rank it runs in place, which is collective.

        - `metrics`, `forward`: replace the trainer's.
        - `options`: the fields of `LoaderOptions`, such as `num_workers` and `global_batch_size`, by default that of
          the last fit, or 64.
        """
        is_own = metrics is None and forward is None and self.has_own_validation
        wanted = None if is_own else self.all_metrics if metrics is None else dict(metrics)
        self._check_inference("evaluating", "`evaluate`", dataset, self.forward if is_own else forward, options)
        values: dict[str, Any] = run_once(
            self, nproc_per_node, "evaluate", evaluate_here, dataset, wanted, forward, options
        )
        return values

    def predict(
        self,
        dataset: Any,
        *,
        to: str | os.PathLike[str] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> Any:
        """Return the model's outputs for all samples of `dataset`, in its order, on the CPU. See `Loop.predict`.

        Runs where `evaluate` would, with the same `options`. On an existing rank, only rank 0 gets the outputs. Returns
        None if there are no samples.

        - `to`: a folder, which must not exist, into which the outputs are written batch by batch.
        - `forward(model, batch)`: returns the part of the output to keep, with one row per sample, such as `lambda
          model, batch: model(**batch)["logits"]`.
        """
        self._check_inference("predicting", "`predict`", dataset, forward, options)
        return run_once(self, nproc_per_node, "predict", predict_here, dataset, to, forward, options)

    def _check_inference(self, did: str, method: str, dataset: Any, forward: Any, options: Mapping[str, Any]) -> None:
        check_loader_options(did, method, options)
        check_forward(did, self.model, forward is not None or self.has_own_forward)
        check_whole(did, "`dataset`", dataset)

    def output_of(self, model: nn.Module, batch: Any) -> Any:
        """Return the prediction for a batch; it needs a target in the batch only if `forward` does."""
        return self.forward(model, batch)[0] if self.has_own_forward else predict_batch(model, batch)

    def call(
        self,
        method: str,
        *args: Any,
        ranks: Literal["zero", "all"] = "zero",
        nproc_per_node: int | str = 0,
        **kwargs: Any,
    ) -> Any:
        """Call the model's `method`, such as "sample", unwrapped, in eval mode, without gradients. Not collective.

        Runs in this process, or with `nproc_per_node` on ranks that are started for it. Returns rank 0's result, or
        with `ranks="all"` a list of every rank's. On an existing rank it runs in place, and ranks not in `ranks` return
        None. Tensors in the result are on the CPU.
        """
        check_choice(f"calling `{method}` of the model", "ranks", ranks, ("zero", "all"))
        if is_on_ranks() or nproc_per_node == 0:
            return call_here(self, method, args, kwargs, ranks)
        results = run_on_ranks(self, nproc_per_node, "call", call_here, method, args, kwargs, ranks)
        return list(results) if ranks == "all" else results[0]

    def find_batch_size(
        self,
        dataset: Any,
        *,
        nproc_per_node: int | str | None = None,
        max_per_rank: int | None = None,
        headroom: float = 0.1,
    ) -> BatchSizeSearch:
        """Find the largest batch size that fits on every rank, by real steps; pass its `global_batch_size` to `fit`.

        Runs where `fit` would, and changes nothing. With `accumulate`, an update has that many batches of this size.

        `dataset`, `max_per_rank`, `headroom`: see `ddpilot.find_batch_size`; a DataLoader's `collate_fn` is used.
        Raises what `ddpilot.find_batch_size` raises, and LoopError for several optimizers, a closure or an overridden
        `train_batch`.
        """
        check_search(max_per_rank, headroom)
        nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        search: BatchSizeSearch = run_once(
            self, nproc_per_node, "find_batch_size", find_batch_size_here, dataset, max_per_rank, headroom
        )
        return search

    def find_learning_rate(
        self,
        train_set: Any,
        *,
        global_batch_size: int | None = None,
        batch_size_per_rank: int | None = None,
        min_lr: float = 1e-7,
        max_lr: float = 10.0,
        num_updates: int = 100,
        nproc_per_node: int | str | None = None,
        loader: LoaderOptions | Mapping[str, Any] | None = None,
        ddp: DDPOptions | Mapping[str, Any] | None = None,
    ) -> LearningRateSearch:
        """Suggest a learning rate, from updates in which it grows from `min_lr` to `max_lr`.

        `plot()` of the result shows these updates. Runs where `fit` would, on a copy, with the trainer's own step and
        without schedulers and callbacks; it changes nothing. Ranks get the same suggestion; see
        `ddpilot.find_learning_rate` for its rule.

        `train_set`, the batch sizes, `loader` and `ddp`: as for `fit`. Raises LoopError for several optimizers, for
        arguments that `fit` refuses, and if the loss diverges within the first updates or never falls.
        """
        check_range(min_lr, max_lr, num_updates)
        if len(self.optimizers) > 1:
            found = f"{len(self.optimizers)} optimizers, whose learning rates are searched for together"
            fix = "Call ddpilot.find_learning_rate(loop, model, optimizer, loader, step) for one of them."
            raise LoopError("searching for a learning rate", found=found, fix=fix)
        if any(isinstance(one, ShardedState) for one in self.optimizers.values()):
            found = "an optimizer whose state an earlier fit divided among these ranks"
            raise LoopError("searching for a learning rate", found=found, fix="Search before the first fit.")
        sizes = {"global_batch_size": global_batch_size, "batch_size_per_rank": batch_size_per_rank}
        fit = FitOptions(
            train_set=train_set,
            check_finite=False,
            progress=False,
            loader={**sizes, "shuffle": True, "num_workers": 0, **keywords_of(loader)},
            ddp=keywords_of(ddp),
        )
        check_fit(self, fit)
        nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        search: LearningRateSearch = run_once(
            self, nproc_per_node, "find_learning_rate", find_learning_rate_here, fit, min_lr, max_lr, num_updates
        )
        return search


def _loop_here(trainer: TrainerCore) -> Loop:
    """Return a loop with the trainer's precision; this process's random states stay as they are. Collective."""
    group = group_here()
    with fork_rng([group.device]):
        return Loop(trainer.seed, precision=trainer.precision, group=group, progress=False)


def evaluate_here(
    trainer: TrainerCore,
    dataset: Any,
    metrics: Mapping[str, Any] | None,
    forward: Forward | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Implement `Trainer.evaluate`; `forward`, `metrics`: None for the trainer's. Collective on ranks."""
    loop = _loop_here(trainer)
    model, loader = _place(trainer, dataset, options, loop)
    if metrics is None:
        return trainer.measure(loop, model, loader)
    return loop.evaluate(model, loader, metrics, forward=forward or trainer.forward)


def predict_here(
    trainer: Trainer,
    dataset: Any,
    to: str | os.PathLike[str] | None,
    forward: Callable[[nn.Module, Any], Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """Implement `Trainer.predict`; `forward`: None for the trainer's. Collective on ranks."""
    loop = _loop_here(trainer)
    model, loader = _place(trainer, dataset, options, loop)
    return loop.predict(model, loader, to=to, forward=forward or trainer.output_of)


def call_here(trainer: TrainerCore, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: str) -> Any:
    """Implement `Trainer.call`. Not collective."""
    group = group_here()
    if ranks == "zero" and not group.is_rank_zero:
        return None
    model = ensure_on_device(find_inner(trainer.ema or trainer.model), group.device)
    with Precision(trainer.precision, group.device).autocast():
        return call_model(model, method, *args, device=group.device, **kwargs)


def _place(trainer: TrainerCore, dataset: Any, options: Mapping[str, Any], loop: Loop) -> tuple[nn.Module, Loader]:
    """Return the model on the device, and this rank's loader."""
    model = ensure_on_device(find_inner(trainer.ema or trainer.model), loop.device)
    if not trainer.position.num_updates:
        broadcast_tensors(model.parameters(), loop.group)  # a script may have initialized each rank differently
    if isinstance(dataset, DataLoader):
        options = {**options, "say": None}  # its batch size does not affect the results
    elif not has_size(options):
        options = {**options, "global_batch_size": trainer.batch_size}
    return model, make_loader_of(dataset, loop, options)


def find_batch_size_here(
    trainer: TrainerCore, dataset: Any, max_per_rank: int | None, headroom: float
) -> BatchSizeSearch:
    """Implement `Trainer.find_batch_size`. Collective."""
    _check_searchable(trainer)
    is_loader = isinstance(dataset, DataLoader)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert trainer.loss_fn is not None  # checked by _check_searchable()
        loss: torch.Tensor = add_losses(with_count(trainer.loss_fn(*trainer.forward(model, batch)))[0])
        return loss

    loop = _loop_here(trainer)
    move(trainer.model, loop.device)
    (optimizer,) = trainer.optimizers.values()
    move_optimizer_state(optimizer)
    return find_batch_size(
        loop,
        trainer.model,
        optimizer,
        dataset.dataset if is_loader else dataset,
        step,
        collate_fn=dataset.collate_fn if is_loader else None,
        max_per_rank=max_per_rank,
        headroom=headroom,
    )


def find_learning_rate_here(
    trainer: TrainerCore, fit: FitOptions, min_lr: float, max_lr: float, num_updates: int
) -> LearningRateSearch:
    """Implement `Trainer.find_learning_rate`, on a copy of the trainer. Collective."""
    group = group_here()
    with fork_rng([group.device]):
        trial = copy_trainer(trainer)
        loop = Loop(trainer.seed, accumulate=trainer.accumulate, precision=trainer.precision, group=group).trial()
        run, _ = prepare_fit(trial, loop, fit)
        run.schedulers = {}

        def train_batch(batch: Any) -> tuple[float, float]:
            returned = trial.train_batch(run, batch)
            named = returned if isinstance(returned, Mapping) else {"loss": returned}
            means = [joint_mean(loop, *with_count(loss)) for loss in named.values()]
            if not isinstance(returned, Summands):
                return means[0]
            assert loop.batch is not None  # inside `batches`
            return sum(mean for mean, _ in means), float(loop.batch.global_count)

        loader, _ = make_loaders(fit, loop)
        found = sweep(loop, loader, run.optimizer, train_batch, min_lr, max_lr, num_updates)
    loop.print(found)
    return found


def _check_searchable(trainer: TrainerCore) -> None:
    """Raise LoopError for a trainer whose training step cannot be tried here."""
    if trainer.has_own_step or trainer.loss_fn is None:
        found = "an overridden `train_batch`"
    elif len(trainer.optimizers) > 1:
        found = f"{len(trainer.optimizers)} optimizers"
    elif trainer.closure:
        found = "an optimizer with a closure"
    else:
        return
    raise LoopError(
        "searching for a batch size",
        found=f"{found}, so the memory that a step uses is unknown",
        fix="Call ddpilot.find_batch_size(loop, model, optimizer, dataset, step) on the ranks, with the step to try.",
    )
