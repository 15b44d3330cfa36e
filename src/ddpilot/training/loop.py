# SPDX-License-Identifier: Apache-2.0
"""`Loop`: what a training loop of one's own needs to give the same numbers at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.devices import to_device
from ddpilot.data.loader import ShardedLoader, StreamLoader, make_loader, make_stream_loader
from ddpilot.data.options import naming_rank
from ddpilot.data.shard import shard_loader
from ddpilot.errors import LoopError
from ddpilot.training.accumulating import Accumulation
from ddpilot.training.batch_norm import check_batch_norms
from ddpilot.training.ddp_options import DdpOptions
from ddpilot.training.explanation import Explanation
from ddpilot.training.grouping import Loader, check_loader, is_at_end, iterate_groups
from ddpilot.training.keeping.place import describe_data
from ddpilot.training.keeping.things import has_state
from ddpilot.training.loop_keeping import KeepingLoop
from ddpilot.training.loop_looking import LookingLoop
from ddpilot.training.memory import explain_out_of_memory, is_out_of_memory
from ddpilot.training.notices import never_had_a_sample, say_dropped, say_findings, user_line
from ddpilot.training.updating import clear_gradients
from ddpilot.training.wrapping import prepare_optimizer, wrap


class Loop(KeepingLoop, LookingLoop):
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

    def prepare(
        self,
        *things: Any,
        comm: Literal["bf16", "fp16"] | None = None,
        shard: Literal["optimizer"] | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        forward_sync_buffers: bool = False,
        sync_batch_norm: bool = False,
        **more: Any,
    ) -> Any:
        """Put models on the device and, with several ranks, into DDP; return all in the order given. Collective.

        `things`: models, optimizers, and what else is to be saved with them: schedulers, an `AveragedModel`, anything
        with `state_dict` and `load_state_dict`; one comes back by itself, several as a tuple. Weights and buffers
        become those of rank 0. A model that comes back has the methods of the one that went in, which run as forward
        passes of DDP. `explain` says what was chosen, and why.

        `comm`: gradients cross, and are summed, in 16 bits. `shard="optimizer"`: each rank keeps the state of its share
        of the parameters only; use the optimizer that is returned. `find_unused_parameters`: updates may leave
        parameters out; None: as the variable DDP_FIND_UNUSED_PARAMETERS says, else False. `static_graph`: all updates
        of the training use the same parameters alike. `bucket_cap_mb`: MiB; None: DDP's 25. `gradient_as_bucket_view`:
        no second copy of gradients. `forward_sync_buffers`: rank 0's buffers go out in forward passes too, and every
        rank has to run as many. `sync_batch_norm`: BatchNorm over all ranks, on GPUs only. `more`: further arguments
        of DistributedDataParallel.

        Raises LoopError for anything else, for a DDP model, for options that DDP does not have or that do not go with
        a model or an optimizer, and for `sync_batch_norm` on the CPU.
        """
        returned = []
        with naming_rank(self.rank):
            options = DdpOptions(
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=gradient_as_bucket_view,
                forward_sync_buffers=forward_sync_buffers,
                comm=comm,
                sync_batch_norm=sync_batch_norm,
                more=more,
            )
            for thing in things:
                returned.append(self._prepare_thing(thing, options, shard))
                self._things.add(returned[-1])
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _prepare_thing(self, thing: Any, options: DdpOptions, shard: Literal["optimizer"] | None) -> Any:
        if isinstance(thing, AveragedModel):
            return thing.to(self.device)
        if isinstance(thing, nn.Module):
            return self._prepare_model(thing, options)
        if isinstance(thing, Optimizer):
            optimizer = prepare_optimizer(thing, self.group, shard)
            self._optimizers.append(optimizer)
            self._prepared.add_optimizer(optimizer)
            return optimizer
        if has_state(thing):
            return thing
        raise LoopError(
            "preparing",
            found=f"a {type(thing).__name__}",
            fix="Pass models, optimizers, and what else has a state_dict; datasets go to loop.loader().",
            rank=self.rank,
        )

    def _prepare_model(self, given: nn.Module, options: DdpOptions) -> nn.Module:
        model, choices = wrap(given, self.group, options)
        self._updates.add(model)
        self._trained.remember(self._updates.models)
        self._unprepared.add(model)
        self._prepared.add_model(model, choices)
        return model

    def explain(self) -> Explanation:
        """What `prepare` chose for each model and optimizer, why, what it costs, and what would be better. Collective.

        By what DDP has recorded of itself so far on all ranks: after some ten updates there are times, and proposals
        for `find_unused_parameters`, `static_graph` and the exchange. Nothing is switched on by itself: a branch may
        be taken later, or on one rank only. Every rank calls it and gets the same; `loop.print(loop.explain())`.
        """
        return self._prepared.explain(self._accumulate, self._things.name_of)

    def loader(self, dataset: Any, **options: Any) -> ShardedLoader | StreamLoader:
        """A loader of this rank's samples of `dataset`, map-style or iterable; not collective.

        `options`: `global_batch_size` (samples of all ranks together) or `batch_size_per_rank`, `shuffle`, `drop_last`,
        `shares`, `weights`, `num_workers` and others: docs/data.md has a table of them. Raises DataError, also for a
        name that is none of them.
        """
        if isinstance(dataset, DataLoader):
            raise LoopError(
                "making a loader",
                found="a DataLoader instead of a dataset",
                fix="Write loop.shard(loader), which divides it among the ranks.",
                rank=self.rank,
            )
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed}
        make: Any = make_stream_loader if isinstance(dataset, IterableDataset) else make_loader
        with naming_rank(self.rank):
            return make(dataset, **{**job, **options})  # type: ignore[no-any-return]

    def shard(self, loader: DataLoader[Any], **options: Any) -> ShardedLoader | StreamLoader:
        """The loader of this rank that does what an existing DataLoader does in one process; not collective.

        Its `batch_size` is that of all ranks together, which is said once; `batch_size_per_rank=True` is the other
        reading. `options`: also `shares`, `cache`, `seed`, `divides_itself` and `seed_samples`, see docs/data.md.
        Raises DataError.
        """
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed, "say": self._say_once}
        with naming_rank(self.rank):
            return shard_loader(loader, **{**job, **options})

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
                self._say_dropped()
                self._updates.settle_outside()
                if self.should_stop:
                    self._keeper.leave()
                    return
                self._place.begin_epoch()
                yield self.epoch
                if self.next_batch:  # left in the middle, and saved there: a later run goes on
                    return
                self._keeper.end_epoch()
            self._say_dropped()
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
                loader, self.group, epoch=self.epoch, first_batch=self.next_batch, accumulation=self._accumulate
            )
        )
        shown = self.progress.epoch(self.epoch, self._num_epochs, self.next_batch, loader)
        with self._signals, shown:
            for batch in groups:
                self._updates.enter(batch)
                if batch.data is None:
                    raise never_had_a_sample(batch, self.group)
                try:
                    yield to_device(batch.data, self.device)
                except GeneratorExit:
                    self._place.end_pass()
                    self._leaving.note(batch, line := user_line())
                    if self._updates.drop_unfinished():
                        self._left_at = line
                    raise
                self.progress.advance()
                if batch.is_last:
                    self._updates.settle()
                    self._place.samples_seen += batch.group_count
                    self._keeper.after_update(batch.index + 1, leaves=self.should_stop)
                if batch.is_last and self.should_stop and not is_at_end(loader, batch):
                    self.next_batch = batch.index + 1
                    break
            else:
                if self.next_batch and self._updates.batch is None and "dataset_length" not in describe_data(loader):
                    self._keeper.say_nothing_left()
                self._place.end_pass()
            self._updates.leave()

    def _begin_pass(self, loader: Loader) -> bool:
        check_loader(loader, self.group)
        if self.should_stop and self.next_batch:
            return False  # an earlier pass of the epoch was left, and that is where it goes on
        if not self._keeper.is_in_epochs:
            with naming_rank(self.rank):  # where a plan looks at its sampler, it does not know the rank
                is_next = self._place.is_next_epoch(loader)
            if is_next and self.should_stop:
                return False
            if is_next:
                self._place.begin_epoch_outside()
        self._say_dropped()
        self._trained.begin()
        self._known = ()
        with naming_rank(self.rank):
            found = check_batch_norms(self._updates.models, getattr(loader, "plan", None), self.rank)
            is_open = self._place.begin_pass(loader, self.device)
        say_findings(new := tuple(one for one in found if one not in self.findings), self.group)
        self.findings += new
        if is_open:
            self._decider.start()
            self._keeper.say_resumed()
        return is_open

    def _say_dropped(self) -> None:
        self._leaving.meet()
        # Not when the loop is left: that looks the same where an error or another rank's end is the reason.
        if self._left_at is not None:
            say_dropped(self._left_at, self.group)
            self._left_at = None

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

    def backward(self, loss: torch.Tensor, count: float | None = None, *, retain_graph: bool = False) -> None:
        """Add the gradient of this rank's mean `loss`, weighted so that the update is that of all samples' mean.

        `loss`: a scalar, the mean over this rank's samples of the batch; a rank without samples adds exact zeros, NaN
        or not. `count`: what the mean is over where that is not samples (tokens, boxes); it costs a small collective.
        Collective with the last batch of an accumulation group, and with `count`. Raises LoopError.
        """
        try:
            self._updates.backward(loss, count, self._precision.scaler, retain_graph)
        except LoopError as error:
            self._updates.locate(error)
            raise
        self.progress.note_loss(loss)

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

    def step(self, optimizer: Optimizer, scheduler: Any = None) -> bool:
        """Update the weights, clear the gradients, step the `scheduler`; whether it did. Collective.

        False, and nothing done, while gradients are still accumulated; False too where fp16 skips the update, on all
        ranks alike. Raises NonFiniteError on all ranks, before anything is updated, and LoopError at any number of
        ranks: for parameters that are in no prepared model, and in `batches` for gradients without any `loop.backward`;
        with several ranks for those of a forward pass that went round DDP.
        For what is meant otherwise call `optimizer.step()`.
        """
        if not self.is_update:
            return False
        try:
            return self._step(optimizer, scheduler)
        except LoopError as error:
            self._updates.locate(error)
            raise

    def _step(self, optimizer: Optimizer, scheduler: Any) -> bool:
        if not hasattr(optimizer, "param_groups"):
            found = f"a {type(optimizer).__name__} in place of an optimizer"
            raise LoopError("updating the weights", found=found, fix="Write loop.step(optimizer).", rank=self.rank)
        self._unprepared.check_optimizer(optimizer)
        self._updates.check_backward(optimizer)
        self._updates.settle()
        self._updates.check(optimizer)
        try:
            done = self._precision.step(optimizer)
        except (RuntimeError, MemoryError) as error:  # an optimizer makes its state in its first step
            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(error, self.group, self._sharing, self._updates.batch) from error
        clear_gradients(optimizer)
        if done and scheduler is not None:
            scheduler.step()
        self._place.num_updates += done and (not self._optimizers or optimizer is self._optimizers[0])
        return done
