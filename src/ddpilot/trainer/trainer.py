# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: the loop written for you."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.errors import LoopError, RankError
from ddpilot.trainer.batches import Summands, check_attached, check_weighted, with_count
from ddpilot.trainer.checking import check_fit, check_goal, naming_arguments
from ddpilot.trainer.fitting import Fit, fit_here
from ddpilot.trainer.history import History
from ddpilot.trainer.outcome import Outcome, apply, as_it_was, collect, explain_late
from ddpilot.trainer.places import group_here, is_on_ranks, run_on_ranks, say_ignored
from ddpilot.trainer.run import Run
from ddpilot.trainer.sizing import Search, find_batch_size_here
from ddpilot.trainer.trainer_looking import LookingTrainer
from ddpilot.training.batch_size import BatchSizeSearch, check_search
from ddpilot.training.inside import run_inside
from ddpilot.training.signals import StopSignals

_WHICH_SIZE = "Say `global_batch_size`, of all ranks together, or `batch_size_per_rank`."

_NUM_CHECKED = 8
"""Batches of an epoch whose labels are looked at, which makes the host wait for a GPU."""


class Trainer(LookingTrainer):
    """The loop written for you, made of `Loop`: what is trained, and how an update is made.

    `model`: on the CPU; a ModuleDict where several are trained. `loss_fn(output, target)`: this rank's mean loss, or
    (mean loss, count of what it is over, such as tokens). `optimizer`: one of the model's parameters, a function that
    makes it of them, or a mapping of those by the names of parts of the model; all are stepped with each update.
    `metrics`: as for `Loop.evaluate`. `callbacks`: `Callback`s.

    `forward(model, batch) -> (output, target)` says what loss, metrics and predictions come from; by default a batch is
    `(x, y)`, or a mapping that the model takes by name. `scheduler`: one, or a function of the optimizer; stepped with
    each update, or `scheduler_per` "epoch" (a ReduceLROnPlateau always, by the validation loss). `ema`: decay of an
    average of the weights, which evaluations and predictions use. `clip_norm`: limit of the gradient's norm. `seed`,
    `accumulate`, `precision`: as for `Loop`. `launcher`: how ranks are started.

    For a step of another kind, override `train_batch`. Raises LoopError for an optimizer of other parameters.
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
        if is_on_ranks():
            say_ignored(nproc_per_node)
            with StopSignals() as signals:
                late = fit_here(self, fit, signals)
        elif nproc_per_node == 0:
            with StopSignals() as signals, as_it_was(self):
                late = fit_here(self, fit, signals)
        else:
            late = self._fit_on_ranks(fit, nproc_per_node)
        if late is not None:
            raise late
        return self.history

    def _fit_on_ranks(self, fit: Fit, nproc_per_node: int | str | None) -> RankError | None:
        self.nproc_per_node = self.nproc_per_node if nproc_per_node is None else nproc_per_node
        outcomes = run_on_ranks(self.launcher, self.nproc_per_node, "fit", self, fit)
        apply(self, outcomes[0])
        late = outcomes[0].late
        return None if late is None else explain_late(late, len(outcomes))

    def _fit_here(self, fit: Fit) -> Outcome | None:
        with StopSignals() as signals:
            late = fit_here(self, fit, signals)
            return collect(self, group_here(), late)

    def train_batch(self, run: Run, batch: Any) -> Any:
        """One batch: forward, backward, and the update where one is due; override it for a step of another kind.

        Returns what is recorded: a mean loss, (mean loss, count), or a dict of those by name. `run.wrapped` is what
        to call, `run.optimizers` what to step, `run.loop` has the rest: `accumulate`, `backward`, `step`.
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

    @property
    def _has_own_step(self) -> bool:
        return type(self).train_batch is not Trainer.train_batch
