# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: the loop written for you."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddpilot.api.launch import Launcher
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.trainer.batches import Forward, check_attached, forward_batch, predict_batch, with_count
from ddpilot.trainer.callback import Callback, check_callbacks
from ddpilot.trainer.checking import (
    check_choice,
    check_fit,
    check_goal,
    check_loader_options,
    check_model,
    check_trainer,
    check_whole,
)
from ddpilot.trainer.fitting import Fit, fit_here
from ddpilot.trainer.history import History
from ddpilot.trainer.looking import call_here, evaluate_here, predict_here
from ddpilot.trainer.outcome import Outcome, apply, as_it_was, collect, raise_late
from ddpilot.trainer.parts import make_ema, make_optimizers, make_schedulers
from ddpilot.trainer.places import group_here, is_on_ranks, run_on_ranks, say_ignored
from ddpilot.trainer.position import Position
from ddpilot.trainer.run import Run
from ddpilot.trainer.sizing import Search, find_batch_size_here
from ddpilot.training.batch_size import BatchSizeSearch, check_search
from ddpilot.training.explanation import Explanation
from ddpilot.training.inside import run_inside
from ddpilot.training.precision import Kind
from ddpilot.training.signals import StopSignals
from ddpilot.training.wrapping import class_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trainer:
    """The loop written for you, made of `Loop`: what is trained, and how an update is made.

    `model`: on the CPU; a ModuleDict where several are trained. `loss_fn(output, target)`: this rank's mean loss, or
    (mean loss, count of what it is over, such as tokens). `optimizer`: one of the model's parameters, a function that
    makes it of them, or a mapping of those. `metrics`: as for `Loop.evaluate`. `callbacks`: `Callback`s.

    `forward(model, batch) -> (output, target)` says what loss, metrics and predictions come from; by default a batch is
    `(x, y)`, or a mapping that the model takes by name. `scheduler`: one, or a function of the optimizer; stepped with
    each update, or `scheduler_per` "epoch" (a ReduceLROnPlateau always, by the validation loss). `ema`: decay of an
    average of the weights, which evaluations and predictions use. `clip_norm`: limit of the gradient's norm. `seed`,
    `accumulate`, `precision`: as for `Loop`. `launcher`: how ranks are started.

    For a step of another kind, override `train_batch`. Raises LoopError for an optimizer of other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        forward: Forward | None = None,
        scheduler: Any = None,
        scheduler_per: Literal["update", "epoch"] = "update",
        ema: float | AveragedModel | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Kind = "fp32",
        seed: int = 0,
        launcher: Launcher | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        """The model that was given; after a fit with the trained weights."""
        self.loss_fn = loss_fn
        self.optimizers = make_optimizers(optimizer, model)
        self.schedulers = make_schedulers(scheduler, self.optimizers)
        self.ema = make_ema(ema, model)
        self.metrics = dict(metrics or {})
        self.callbacks = list(callbacks)
        check_callbacks(callbacks)
        self.forward: Forward = forward or forward_batch
        self.scheduler_per = scheduler_per
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.precision: Kind = precision
        self.seed = seed
        self.launcher = launcher
        self.history = History()
        """Rows of all fits so far."""
        self.position = Position()
        """How far it has come, over all fits: `epoch`, `num_updates`."""
        self.findings: tuple[Finding, ...] = ()
        """What fits have found to be unwise, each said once."""
        self.explanation: Explanation | None = None
        """What the last fit chose for DDP: see `explain`."""
        self._has_own_forward = forward is not None
        self.batch_size = 64
        """Samples of all ranks in a batch of `evaluate` and `predict`, by default: that of the last fit."""
        self.nproc_per_node: int | str | None = None
        """Ranks of the last fit that said a number of them, which the next one starts too."""
        check_trainer(self)

    @property
    def all_metrics(self) -> dict[str, Any]:
        """The loss, by the name "loss", and the metrics."""
        return self.metrics if self.loss_fn is None else {"loss": self.loss_fn, **self.metrics}

    def fit(
        self,
        train_set: Any,
        val_set: Any = None,
        *,
        epochs: int | None = None,
        until_epoch: int | None = None,
        global_batch_size: int | None = None,
        batch_size_per_rank: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        nproc_per_node: int | str | None = None,
        max_time_s: float | None = None,
        validate_every: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = True,
        other_data: bool = False,
        checkpoints: Mapping[str, Any] | None = None,
        check_finite: bool = True,
        progress: bool | None = None,
        loader: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> History:
        """Train for `epochs` more epochs (1), or until there are `until_epoch` of them, and return `history`.

        Collective on a rank (of torchrun, Slurm, `launch`, a session), where it trains right there. Anywhere else it
        starts ranks, `nproc_per_node` of them (None: as in the last fit, and otherwise as `launcher` says, one for each
        accelerator, or one), sends them the trainer and the data, and takes weights, optimizer state, history and what
        callbacks recorded back into this process's objects, in place; 0: trains in this process. Nothing here touches
        a GPU.

        `train_set`, `val_set`: datasets, with `global_batch_size` or `batch_size_per_rank`; or DataLoaders, with their
        own batch size. `validate_every`: after every so many epochs, counted over all fits, and after the last one.
        `loader`: more options of `Loop.loader` for the training data; `ddp`: options of `Loop.prepare`.
        `checkpoint_dir`, `resume`: as for `Loop`, which goes on from the latest checkpoint there if that is further
        than this trainer; `other_data`: also where an epoch begins with a dataset of another length. `checkpoints`:
        `keep`, `best` (of the history's names, "max val_acc") and the other options.
        `epochs` counts from where the trainer is, so a call that is repeated trains on; `until_epoch` is a total, with
        which it does not. `check_finite`: as for `Loop`. `progress`: False shows no bar and no line for each epoch.

        After Ctrl-C, `max_time_s` seconds or a callback's stop all ranks leave after the same update, within about 0.1
        s (see `Run.stop`), and it returns; the next fit on the same data goes on there. Where a rank raises,
        RankError, and with `nproc_per_node=0` what was raised: everything here is then as it was before. On a rank
        that was there already, an exception leaves things as the updates so far made them. What a callback of rank 0
        raises once the last update was made is raised as well, and what was learnt is here. Raises LoopError, before
        a rank starts, for what cannot be meant.
        """
        check_goal(epochs, until_epoch)
        sizes = {"global_batch_size": global_batch_size, "batch_size_per_rank": batch_size_per_rank}
        fit = Fit(
            train_set=train_set,
            val_set=val_set,
            epochs=1 if epochs is None else epochs,
            until_epoch=until_epoch,
            sizes=sizes,
            shuffle=shuffle,
            num_workers=num_workers,
            max_time_s=max_time_s,
            validate_every=validate_every,
            checkpoints={"checkpoint_dir": checkpoint_dir, "resume": resume, **(checkpoints or {})},
            other_data=other_data,
            check_finite=check_finite,
            progress=progress,
            loader=loader or {},
            ddp=ddp or {},
        )
        check_fit(self, fit, has_own_step=self._has_own_step)
        self.batch_size = global_batch_size or getattr(train_set, "batch_size", None) or self.batch_size
        if is_on_ranks():
            say_ignored(nproc_per_node)
            with StopSignals() as signals:
                late = fit_here(self, fit, signals)
        elif nproc_per_node == 0:
            with StopSignals() as signals, as_it_was(self):
                late = fit_here(self, fit, signals)
        else:
            self.nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
            outcomes = run_on_ranks(self.launcher, self.nproc_per_node, "fit", self, fit)
            apply(self, outcomes[0])
            if outcomes[0].late is not None:
                raise_late(outcomes[0].late, len(outcomes))
            late = None
        if late is not None:
            raise late
        return self.history

    def _fit_here(self, fit: Fit) -> Outcome | None:
        with StopSignals() as signals:
            late = fit_here(self, fit, signals)
            return collect(self, group_here(), late)

    def train_batch(self, run: Run, batch: Any) -> Any:
        """One batch: forward, backward, and the update where one is due; override it for a step of another kind.

        Returns what is recorded: a mean loss, (mean loss, count), or a dict of mean losses by name. `run.wrapped` is
        what to call, `run.optimizers` what to step, `run.loop` has the rest: `accumulate`, `backward`, `step`.
        """
        loop = run.loop
        if self.loss_fn is None:
            raise LoopError("training a batch", found="no `loss_fn`", fix="Give one, or override `train_batch`.")
        with loop.accumulate(run.wrapped):
            output, target = run_inside(run.wrapped, lambda model: self.forward(model, batch))
            loss, count = with_count(self.loss_fn(output, target))
            check_attached(loss, loop.rank)
            loop.backward(loss, count)
        if self.clip_norm is not None:
            loop.clip_grad_norm_(run.model.parameters(), self.clip_norm)
        name, optimizer = next(iter(run.optimizers.items()))
        loop.step(optimizer, run.schedulers.get(name))
        return loss if count is None else (loss, count)

    def evaluate(
        self,
        dataset: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        forward: Forward | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """The loss and the value of each metric over all samples of `dataset`, each counted once.

        In this process, where the model then moves to the device; with `nproc_per_node` on ranks that are started for
        it; on a rank right there, which is collective. `metrics`, `forward`: instead of the trainer's. `options`: those
        of `Loop.loader`, such as `global_batch_size` (default: that of the last fit, or 64) and `num_workers`.
        """
        wanted = self.all_metrics if metrics is None else dict(metrics)
        check_loader_options("evaluating", "`evaluate`", options)
        check_whole("evaluating", "`dataset`", dataset)
        if is_on_ranks() or nproc_per_node == 0:
            return self._evaluate_here(dataset, wanted, forward, options)
        said = run_on_ranks(self.launcher, nproc_per_node, "evaluate", self, dataset, wanted, forward, options)
        found: dict[str, Any] = said[0]
        return found

    def _evaluate_here(
        self, dataset: Any, metrics: dict[str, Any], forward: Forward | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        return evaluate_here(self, dataset, metrics, forward or self.forward, options)

    def predict(
        self,
        dataset: Any,
        *,
        to: str | os.PathLike[str] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        nproc_per_node: int | str = 0,
        **options: Any,
    ) -> Any:
        """The model's outputs for all samples of `dataset`, in its order, on the CPU; see `Loop.predict`.

        Where it runs, and `options`, are as for `evaluate`. `to`: a folder to write them into, batch by batch, which
        must not exist yet. `forward(model, batch)` returns what is kept of the output, with a row for each sample:
        `lambda model, batch: model(**batch)["logits"]`. On a rank they are returned on rank 0 alone; None where
        there are no samples.
        """
        check_loader_options("predicting", "`predict`", options)
        check_whole("predicting", "`dataset`", dataset)
        if is_on_ranks() or nproc_per_node == 0:
            return self._predict_here(dataset, to, forward, options)
        return run_on_ranks(self.launcher, nproc_per_node, "predict", self, dataset, to, forward, options)[0]

    def _predict_here(
        self,
        dataset: Any,
        to: str | os.PathLike[str] | None,
        forward: Callable[[nn.Module, Any], Any] | None,
        options: dict[str, Any],
    ) -> Any:
        return predict_here(self, dataset, to, forward or self.output_of, options)

    def output_of(self, model: nn.Module, batch: Any) -> Any:
        """What is predicted for a batch; it needs no target, unless `forward` does."""
        return self.forward(model, batch)[0] if self._has_own_forward else predict_batch(model, batch)

    def call(
        self,
        method: str,
        *args: Any,
        ranks: Literal["zero", "all"] = "zero",
        nproc_per_node: int | str = 0,
        **kwargs: Any,
    ) -> Any:
        """What the model's `method` returns, such as "sample", on the CPU: unwrapped, in eval mode, without gradients.

        In this process; with `nproc_per_node` on ranks that are started for it: what rank 0 returned, or with `ranks`
        "all" every rank's, in a list; on a rank right there, None where it is not one of `ranks`. Not collective.
        """
        check_choice(f"calling `{method}` of the model", "ranks", ranks, ("zero", "all"))
        if is_on_ranks() or nproc_per_node == 0:
            return self._call_here(method, args, kwargs, ranks)
        said = run_on_ranks(self.launcher, nproc_per_node, "call", self, method, args, kwargs, ranks)
        return list(said) if ranks == "all" else said[0]

    def _call_here(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: str) -> Any:
        return call_here(self, method, args, kwargs, ranks)

    def find_batch_size(
        self,
        dataset: Any,
        *,
        nproc_per_node: int | str | None = None,
        max_per_rank: int | None = None,
        headroom: float = 0.1,
    ) -> BatchSizeSearch:
        """The largest batch that fits on every rank, by real steps; its `global_batch_size` is for `fit`.

        Where it runs is as for `fit`. Nothing is changed by it. `dataset`, `max_per_rank`, `headroom`: see
        `ddpilot.find_batch_size`; a DataLoader's `collate_fn` is used. With `accumulate`, an update has as many batches
        of that size. Raises what that raises, and LoopError for several optimizers or a `train_batch` of one's own.
        """
        check_search(max_per_rank, headroom)
        search = Search(dataset=dataset, max_per_rank=max_per_rank, headroom=headroom)
        nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        if is_on_ranks() or nproc_per_node == 0:
            return self._find_batch_size_here(search)
        found: BatchSizeSearch = run_on_ranks(self.launcher, nproc_per_node, "find_batch_size", self, search)[0]
        return found

    def _find_batch_size_here(self, search: Search) -> BatchSizeSearch:
        return find_batch_size_here(self, search, has_own_step=self._has_own_step)

    def __repr__(self) -> str:
        num = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        name = f"{type(self).__name__}({class_name(self.model)}, {num:,} parameters to train"
        return f"{name}; epoch {self.position.epoch}, {self.position.num_updates} updates)"

    @property
    def _has_own_step(self) -> bool:
        return type(self).train_batch is not Trainer.train_batch

    def explain(self) -> Explanation:
        """What the last fit chose for DDP and the optimizers, why, what it cost, and what would be better.

        The text of `Loop.explain` at the end of that fit; a notebook shows a table. Not collective. Raises LoopError
        before the first fit.
        """
        if self.explanation is None:
            found = "no fit has ended yet, which is what chooses and measures"
            raise LoopError("explaining what was chosen", found=found, fix="Call fit() first; `ddp=` chooses yourself.")
        return self.explanation

    def plot(self) -> Figure:
        """Losses and metrics over the epochs, as a matplotlib figure; a notebook shows it as the value of a cell.

        Raises LoopError where nothing was recorded yet.
        """
        from ddpilot.trainer.plotting import plot_history

        return plot_history(self.history)
