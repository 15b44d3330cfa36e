# SPDX-License-Identifier: Apache-2.0
"""`Loop`: what a training loop of one's own needs to give the same numbers at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot.data.devices import to_device
from ddpilot.data.options import naming_rank
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.training.accumulating import Accumulation
from ddpilot.training.batch_norm import check_batch_norms
from ddpilot.training.closures import check_closure, needs_closure
from ddpilot.training.grouping import CurrentBatch, Loader, check_loader, is_at_end, iterate_groups
from ddpilot.training.keeping.place import describe_data
from ddpilot.training.loop_keeping import KeepingLoop
from ddpilot.training.loop_looking import LookingLoop
from ddpilot.training.loop_preparing import PreparingLoop
from ddpilot.training.losses import add_losses
from ddpilot.training.memory import explain_out_of_memory, is_out_of_memory
from ddpilot.training.notices import never_had_a_sample, say_findings, say_unsaved, user_line
from ddpilot.training.updating import clear_gradients


class Loop(PreparingLoop, KeepingLoop, LookingLoop):
    """Primitives for a training loop of one's own, the same at 1 rank and at many. Making one is collective.

    `seed`: of weights made after this line (the same on every rank), of the data's order, and, with the rank, of
    dropout in each epoch. `accumulate`: batches that make one update. `precision`: "fp32" (leaves dtypes alone),
    "bf16" or "fp16". `max_time_s`: seconds after which all ranks leave the loop together, counted from the first
    `epochs` or `batches`; None: no limit.
    `check_finite`: raise NonFiniteError on all ranks where a loss is NaN or infinite (with fp16 overflowing updates are
    skipped instead). `backend`, `timeout_s`: of `init_group`, which enters or adopts the process group, also of a rank
    that is alone. `group`: use this one instead.

    `checkpoint_dir`: a directory of the run's own, where a checkpoint is made after each epoch and when all ranks leave
    in the middle of one; None: none are made. `epochs` goes on from the latest one there, at any number of ranks;
    `resume=False` begins anew, and moves what is there aside. `keep`: how many of the newest stay, None for all.
    `best`: "max acc" or "min loss"; the best by that metric of `save` stays too. `save_every_s`, `save_every_updates`:
    make one in the middle of an epoch too, after so many seconds or updates.

    `progress`: rank 0 shows in `batches` how far the epoch is, on stderr. None: a bar in a terminal or a notebook, also
    in the ranks that one starts, and otherwise, for logs, a line every 30 seconds. True: the bar anywhere; False:
    nothing.

    Raises what `init_group` raises, LoopError for arguments that make no sense, and CheckpointError on all ranks where
    the directory cannot be written.
    """

    def epochs(self, num: int) -> Iterator[int]:
        """The numbers of the epochs up to `num` - 1, from `epoch` on, until all ranks decide to stop. Collective.

        With a `checkpoint_dir` it goes on where the latest checkpoint there stands, in the middle of an epoch too, and
        makes one after each epoch; when it ends, the last one is on the disk. SIGTERM and SIGUSR1 then end it with
        SystemExit(75) on all ranks, after a checkpoint: for a scheduler that starts the job again.
        """
        self._place.begin_epochs()
        self._keeper.begin()
        self._decider.start()
        self._num_epochs = num
        with self._signals, self._keeper:
            self._keeper.say_if_finished(num)
            while self.epoch < num:
                self._leaving.settle()
                self._updates.settle_outside()
                if self.should_stop:
                    self._keeper.leave()
                    return
                self._place.begin_epoch()
                yield self.epoch
                if self.next_batch:  # left in the middle, and saved there: a later run goes on
                    return
                self._keeper.end_epoch()
            self._leaving.settle()
            self._keeper.wait()

    def batches(self, loader: Loader) -> Iterator[Any]:
        """This rank's piece of every batch of the epoch, on the device; all ranks leave together, after an update.

        A rank for which a batch has no sample gets one of zero rows, and takes part; a prepared model runs it, on
        made-up rows where it has to. Outside of `epochs`, each further pass over the same data is an epoch of its own,
        with another order. Collective: every rank iterates
        to the end or to the joint stop; after one every further pass of the epoch is empty. SIGINT, SIGTERM and SIGUSR1
        end it after the current update on all ranks; a second SIGINT at once. Raises NonFiniteError on all ranks, and
        LoopError before the first batch for what `loader` and `shard` did not make, and where BatchNorm would see a
        part of one sample.
        """
        if not self._begin_pass(loader):
            return
        groups = self._waiting.over(
            iterate_groups(
                loader,
                self.group,
                epoch=self.epoch,
                first_batch=self.next_batch,
                accumulation=self._accumulate,
                stream_state=self._place.stream_state(self.next_batch),
            )
        )
        shown = self.progress.epoch(self.epoch, self._num_epochs, self.next_batch, loader)
        this = self._open_pass = object()
        try:
            with self._signals, shown:
                for batch in groups:
                    self._updates.enter(batch)
                    if batch.data is None:
                        raise never_had_a_sample(batch, self.group)
                    try:
                        yield to_device(batch.data, self.device)
                    except GeneratorExit:
                        self._leave_pass(batch, this)
                        raise
                    if self._open_pass is not this:
                        self._check_pass(this)
                    self.progress.advance()
                    if batch.has_empty_rank:
                        self._updates.share_buffers()
                    if batch.is_last:
                        self._end_update(batch)
                    if batch.is_last and self.should_stop and not is_at_end(loader, batch):
                        self._updates.check_pending()
                        self.next_batch = batch.index + 1
                        break
                else:
                    self._updates.check_pending()
                    if (
                        self.next_batch
                        and self._updates.batch is None
                        and "dataset_length" not in describe_data(loader)
                    ):
                        self._keeper.say_nothing_left()
                    self._place.end_pass()
                    self._tell_findings(self._drift.end_pass())
                self._updates.leave()
        finally:
            if self._open_pass is this:
                self._open_pass = None

    def _end_update(self, batch: CurrentBatch) -> None:
        """After the last batch of an accumulation group. Collective where something is due."""
        self._updates.settle()
        if self._precision.scaler is not None:
            self._precision.settle()
        self._place.samples_seen += batch.group_count
        self._place.note_stream(batch.index + 1, batch.stream_state)
        if self._drift.is_waiting and self._updates.has_backward:
            self._tell_findings(self._drift.after_update())
        if self._saves_by == "nothing" and self._updates.has_backward:
            self._note_unsaved()
        self._keeper.after_update(batch.index + 1, leaves=self.should_stop)

    def _leave_pass(self, batch: CurrentBatch, this: object) -> None:
        """The loop over `batches` was left by `break` or an exception, or its generator was dropped."""
        if self._open_pass is this:
            self._place.end_pass()
            self._leaving.note(batch, user_line(), drops=self._updates.drop_unfinished())

    def _check_pass(self, this: object) -> None:
        """Raise LoopError if a pass over other batches began while `this` was open, and is open still."""
        if self._open_pass is None:  # that one has ended, within a batch of this one
            self._open_pass = this
            return
        raise LoopError(
            "reading the next batch",
            found="a second loop.batches() was begun before this one ended, so losses were weighted by its samples",
            fix="Iterate over one at a time. For pairs make one dataset: torch.utils.data.StackDataset(a, b), or "
            "one whose __getitem__(i) returns (a[i], b[i % len(b)]); loop.loader(pairs) divides it.",
            rank=self.rank,
        )

    def _note_unsaved(self) -> None:
        """After the first update of a loop with a `checkpoint_dir`: say it if nothing will be resumed or saved."""
        self._saves_by = "user" if self._keeper.is_in_epochs else "unsaved epoch"
        if not self._keeper.is_in_epochs and self._keeper.has_latest:
            self._say_unsaved()

    def _say_unsaved(self) -> None:
        self._saves_by = "user"
        say_unsaved(self.group)

    def _tell_findings(self, found: tuple[Finding, ...]) -> None:
        say_findings(new := tuple(one for one in found if one not in self.findings), self.group)
        self.findings += new

    def _begin_pass(self, loader: Loader) -> bool:
        check_loader(loader, self.group)
        if self.should_stop and self.next_batch:
            return False  # an earlier pass of the epoch was left, and that is where it goes on
        if not self._keeper.is_in_epochs:
            with naming_rank(self.rank):  # where a plan looks at its sampler, it does not know the rank
                is_next = self._place.is_next_epoch(loader)
            if is_next and self.should_stop:
                return False
            if is_next and self._saves_by == "unsaved epoch":
                self._say_unsaved()
            if is_next:
                self._place.begin_epoch_outside()
        self._leaving.settle()
        self._leaving.begin_pass()
        self._updates.share_owed_buffers()
        self._trained.begin()
        self._known = ()
        with naming_rank(self.rank):
            found = check_batch_norms(self._updates.models, getattr(loader, "plan", None), self.rank)
            is_open = self._place.begin_pass(loader, self.device)
        self._tell_findings(found)
        if is_open:
            self._decider.start()
            self._keeper.say_resumed()
        return is_open

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Forward and backward of one batch: gradients cross between ranks only with the last batch of a group.

        Pass the models that `prepare` returned and whose gradients the backward inside adds up. Raises LoopError for
        others, at any number of ranks, and where the forward pass went round DDP, so that gradients did not cross.
        Where memory runs out inside, OutOfMemoryError is raised, on this rank alone: the others end as after any error
        of one rank.
        """
        if models != self._known:
            self._trained.check(models, self.rank)
            self._unprepared.check_models(models)
            self._known = models
        return Accumulation(models, self._updates, self._precision, self.group, self._sharing)

    def backward(
        self,
        loss: torch.Tensor | Mapping[str, torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]],
        count: float | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of this rank's mean `loss`, weighted so that the update is that of all samples' mean.

        `loss`: a scalar, the mean over this rank's samples of the batch; a rank without samples adds exact zeros, NaN
        or not. `count`: what the mean is over where that is not samples (tokens, boxes); it costs a small collective.
        Several losses that are means over different things: `{"box": (loss, num_boxes), "class": loss}`, in one
        backward pass with one small collective; every rank gives the same names, with a count of 0 for a mean over
        nothing (NaN or not). Collective with the last batch of an accumulation group, and with a count or several
        losses. Raises LoopError.
        """
        scaler = self._precision.scaler
        if scaler is not None:
            self._precision.settle_overflow(self._optimizers)
        try:
            if isinstance(loss, torch.Tensor) or not isinstance(loss, Mapping):
                self._updates.backward(loss, count, scaler, retain_graph)
                self.progress.note_loss(loss)
            else:
                self._updates.backward_several(loss, count, scaler, retain_graph)
                if self.progress.is_shown:
                    self.progress.note_loss(add_losses(loss))
        except LoopError as error:
            self._updates.locate(error)
            raise

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float
    ) -> torch.Tensor | None:
        """Scale the gradients of all samples to a norm of `max_norm` at most; their norm before. Not collective.

        None, and nothing done, while gradients are still accumulated. NonFiniteError, on all ranks alike, where the
        norm is not finite (not with fp16, which skips the update).
        """
        if not self.is_update:
            return None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._updates.settle()
        self._precision.unscale(given, self._optimizers)
        norm = nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
        self._updates.check_norm(given, norm)  # before a norm that is NaN makes all of them NaN
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm

    def step(self, optimizer: Optimizer, scheduler: Any = None, *, closure: Callable[[], object] | None = None) -> bool:
        """Update the weights, clear the gradients, step the `scheduler`; whether it did. Collective.

        False, and nothing done, while gradients are still accumulated; False too where fp16 skips the update, on all
        ranks alike. Raises NonFiniteError on all ranks, on the CPU before anything is updated. An accelerator does not
        make the host wait: there the optimizer gets zeros in place of gradients that are not finite, so that weights
        stay finite, and the error follows once the ranks have exchanged what they know, about 0.1 s later (32 updates
        at most, and always before the end of the epoch and a save). A backward pass after the error begins with no
        gradients. Raises LoopError at any number of ranks: for parameters that are in no prepared model, and in
        `batches` for gradients without any `loop.backward`; with several ranks for those of a forward pass that went
        round DDP. For what is meant otherwise call `optimizer.step()`.

        `scheduler`: a ReduceLROnPlateau gets the mean loss of the update over all ranks; it has to be prepared.
        `closure`: for optimizers that compute the loss several times per update (LBFGS, SAM): a function that runs
        forward and `loop.backward`. Gradients are cleared before each call, and the optimizer gets the loss over all
        ranks, whatever the closure returns, so all ranks take the same steps; that costs a small collective per call.
        Not with `accumulate` or fp16. A NonFiniteError leaves the weights where the optimizer was trying them.
        """
        if not self.is_update:
            return False
        try:
            return self._step(optimizer, scheduler, closure)
        except LoopError as error:
            self._updates.locate(error)
            raise

    def _step(self, optimizer: Optimizer, scheduler: Any, closure: Callable[[], object] | None) -> bool:
        if not hasattr(optimizer, "param_groups"):
            found = f"a {type(optimizer).__name__} in place of an optimizer"
            raise LoopError("updating the weights", found=found, fix="Write loop.step(optimizer).", rank=self.rank)
        if self._replaced is not None and optimizer in self._replaced:
            found = f"this {type(optimizer).__name__} was replaced: one that has all its parameters was prepared later"
            fix = "Step that one. If both are to be used, prepare them in one call: loop.prepare(first, second)."
            raise LoopError("updating the weights", found=found, fix=fix, rank=self.rank)
        self._unprepared.check_optimizer(optimizer)
        self._updates.check_backward(optimizer)
        self._updates.settle()
        self._updates.check(optimizer)
        try:
            done = self._update(optimizer, closure)
        except (RuntimeError, MemoryError) as error:  # an optimizer makes its state in its first step
            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(error, self.group, self._sharing, self._updates.batch) from error
        clear_gradients(optimizer)
        self._updates.after_step()
        if self._updates.batch is None:
            self._precision.settle(self._optimizers)
        if done and scheduler is not None:
            self._step_scheduler(scheduler)
        self._place.num_updates += done and (not self._optimizers or optimizer is self._optimizers[0])
        return done

    def _update(self, optimizer: Optimizer, closure: Callable[[], object] | None) -> bool:
        if closure is not None:
            check_closure(optimizer, self._accumulate, self._precision.scaler is not None, self.rank)
            return self._precision.step(optimizer, lambda: self._updates.evaluate(closure, optimizer))
        self._updates.protect(optimizer)
        try:
            return self._precision.step(optimizer)
        except TypeError as error:
            if "closure" not in str(error):
                raise
            raise needs_closure(optimizer, self.rank) from error

    def _step_scheduler(self, scheduler: Any) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
            return
        objective = self._updates.objective
        if objective is None or not objective.is_known:
            raise LoopError(
                "stepping a ReduceLROnPlateau",
                found="it was not prepared, so the loss of the update was not kept for it",
                fix="Write scheduler = loop.prepare(scheduler); or step it by yourself, once per epoch, with a value "
                "that is the same on all ranks, as loop.reduce and loop.evaluate return it.",
                rank=self.rank,
            )
        scheduler.step(objective.reduce().item())
