# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: a complete training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.errors import LoopError
from ddpilot.trainer.batches import Summands, check_attached, check_weighted, with_count
from ddpilot.trainer.checks import check_fit, check_goal, naming_arguments
from ddpilot.trainer.fit import Fit, fit_here, fit_on_rank
from ddpilot.trainer.history import History
from ddpilot.trainer.ranks import is_on_ranks, run_on_ranks, say_ignored
from ddpilot.trainer.result import apply, as_it_was, explain_late
from ddpilot.trainer.run import Run
from ddpilot.trainer.sizing import Search, find_batch_size_here
from ddpilot.trainer.trainer_looking import LookingTrainer
from ddpilot.training.batch_size import BatchSizeSearch, check_search
from ddpilot.training.coordination.signals import StopSignals
from ddpilot.training.models.inside import run_inside

_WHICH_SIZE = "Say `global_batch_size`, of all ranks together, or `batch_size_per_rank`."

_NUM_CHECKED = 8
"""Number of batches per epoch whose labels are checked, which waits for the device."""


class Trainer(LookingTrainer):
    """A complete training loop built on `Loop`, with the model and what defines an update.

    `model`: a module on the CPU, or a ModuleDict of several. `loss_fn(output, target)`: returns this rank's mean loss,
    or (mean loss, count of what the mean is over, such as tokens). `optimizer`: an optimizer of the model's parameters,
    a function that makes one of them, or a mapping of these by names of submodules; all step with each update.
    `metrics`: as for `Loop.evaluate`. `callbacks`: `Callback`s.

    `forward(model, batch) -> (output, target)` computes the arguments of loss, metrics and predictions; by default a
    batch is `(x, y)`, or a mapping of the model's keyword arguments. `scheduler`: a scheduler, or a function of the
    optimizer; steps with each update, or with each epoch if `scheduler_per` is "epoch" (a ReduceLROnPlateau always with
    each epoch, by the validation loss). `ema`: decay of a moving average of the weights, which evaluations and
    predictions use. `clip_norm`: maximum norm of the gradients. `seed`, `accumulate`, `precision`: as for `Loop`.
    `launcher`: how ranks are started.

    Override `train_batch` for a different training step. Raises LoopError for an optimizer with other parameters.
    """

    @naming_arguments("starting a fit", {"batch_size": _WHICH_SIZE})
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
        """Train for `epochs` more epochs (default 1), or until `until_epoch` epochs in total, and return `history`.

        On a rank (of torchrun, Slurm, `launch`, a session) it is collective and trains in place. In any other process
        it starts `nproc_per_node` ranks (None: as in the last fit; in the first one the number of `launcher`, by
        default one per accelerator, or one), sends them the trainer and the data, and loads weights, optimizer state,
        history and the callbacks' states into this process's objects, in place, without using a GPU here. 0 trains in
        this process.

        `train_set`, `val_set`: datasets, with `global_batch_size` or `batch_size_per_rank`; or DataLoaders, with their
        own batch size. `validate_every`: number of epochs between validations, counted over all fits; the last epoch is
        always validated. `loader`: further options of `Loop.loader` for the training data; `ddp`: options of
        `Loop.prepare`. `checkpoint_dir`, `resume`: as for `Loop`, which resumes from the latest checkpoint there if it
        is further than this trainer; `other_data`: also if an epoch starts with a dataset of different length.
        `checkpoints`: `keep`, `best` (with a name of the history, "max val_acc") and the other options. As `epochs`
        counts from the trainer's position, a repeated call trains further; with `until_epoch`, a total, it does not.
        `check_finite`: as for `Loop`. `progress`: False shows neither a bar nor a line per epoch.

        After Ctrl-C, `max_time_s` seconds or a callback's stop, all ranks stop after the same update, within about 0.1
        s (see `Run.stop`), and `fit` returns; the next fit on the same data resumes there. Raises RankError if a rank
        fails, and with `nproc_per_node=0` the original exception: everything in this process is then unchanged. On an
        existing rank, an exception leaves the updates made so far in place. If a callback on rank 0 fails after the
        last update, its error is raised after the trained state was loaded. Raises LoopError for invalid arguments,
        before any rank starts.
        """
        check_goal(epochs, until_epoch)
        fit = Fit(
            train_set=train_set,
            val_set=val_set,
            epochs=1 if epochs is None else epochs,
            until_epoch=until_epoch,
            sizes={"global_batch_size": global_batch_size, "batch_size_per_rank": batch_size_per_rank},
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
        late = self._run_fit(fit, nproc_per_node)
        if late is not None:
            raise late
        return self.history

    def _run_fit(self, fit: Fit, nproc_per_node: int | str | None) -> Exception | None:
        """Run `fit` on the existing ranks, in this process or on new ranks; returns a callback's late error."""
        if is_on_ranks():
            say_ignored(nproc_per_node)
            with StopSignals() as signals:
                return fit_here(self, fit, signals)
        if nproc_per_node == 0:
            with StopSignals() as signals, as_it_was(self):
                return fit_here(self, fit, signals)
        self.nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        outcomes = run_on_ranks(self, self.nproc_per_node, "fit", fit_on_rank, fit)
        apply(self, outcomes[0])
        late = outcomes[0].late
        return None if late is None else explain_late(late, len(outcomes))

    def train_batch(self, run: Run, batch: Any) -> Any:
        """Process one batch: forward, backward, and an update if one is due. Override it for a different training step.

        Returns what to record: a mean loss, (mean loss, count), or a dict of these by name. `run.wrapped` is the model
        to call, `run.optimizers` are the optimizers to step, and `run.loop` has `accumulate`, `backward` and `step`.
        """
        loop = run.loop
        if self.loss_fn is None:
            raise LoopError("training a batch", found="no `loss_fn`", fix="Give one, or override `train_batch`.")
        parts = run.wrapped.values() if isinstance(run.wrapped, dict) else [run.wrapped]
        wrapped = nn.ModuleDict(run.wrapped) if isinstance(run.wrapped, dict) else run.wrapped
        with loop.accumulate(*parts):
            output, target = run_inside(wrapped, lambda model: self.forward(model, batch))
            loss, count = with_count(self.loss_fn(output, target))
            if not isinstance(loss, Mapping):
                check_attached(loss, loop.rank)
            if count is None and loop.batch is not None and loop.batch.index < _NUM_CHECKED:
                check_weighted(loss, output, batch, loop.rank)
            loop.backward(loss, count)
        if self.clip_norm is not None:
            loop.clip_grad_norm_(run.model.parameters(), self.clip_norm)
        for name, optimizer in run.optimizers.items():
            loop.step(optimizer, run.schedulers.get(name))
        if isinstance(loss, Mapping):
            return Summands(loss)
        return loss if count is None else (loss, count)

    def find_batch_size(
        self,
        dataset: Any,
        *,
        nproc_per_node: int | str | None = None,
        max_per_rank: int | None = None,
        headroom: float = 0.1,
    ) -> BatchSizeSearch:
        """Find the largest batch size that fits on every rank, by real steps; pass its `global_batch_size` to `fit`.

        Runs where `fit` would; changes nothing. `dataset`, `max_per_rank`, `headroom`: see `ddpilot.find_batch_size`; a
        DataLoader's `collate_fn` is used. With `accumulate`, an update has that many batches of this size. Raises what
        `ddpilot.find_batch_size` raises, and LoopError for several optimizers or an overridden `train_batch`.
        """
        check_search(max_per_rank, headroom)
        search = Search(dataset=dataset, max_per_rank=max_per_rank, headroom=headroom)
        nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        if is_on_ranks() or nproc_per_node == 0:
            return find_batch_size_here(self, search, self._has_own_step)
        given = search, self._has_own_step
        found: BatchSizeSearch = run_on_ranks(self, nproc_per_node, "find_batch_size", find_batch_size_here, *given)[0]
        return found

    @property
    def _has_own_step(self) -> bool:
        return type(self).train_batch is not Trainer.train_batch
