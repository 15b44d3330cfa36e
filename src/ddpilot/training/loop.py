# SPDX-License-Identifier: Apache-2.0
"""`Loop`: primitives for a custom training loop that gives the same results at any world_size."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.checkpoint.collective import load_jointly, load_shards_jointly
from ddpilot.data.loaders import make_loader, make_shard_loader, make_stream_loader, prepare_data_loader
from ddpilot.data.map_loader import MapLoader
from ddpilot.data.nested import to_device
from ddpilot.data.options import naming_rank
from ddpilot.data.shards.dataset import is_dataset_of_shards
from ddpilot.data.shards.loader import ShardLoader
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.group.device import is_out_of_memory, move
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.profiler.running import RunningProfile
from ddpilot.training.batches import CurrentBatch, Loader, check_loader, is_at_end, iterate_groups
from ddpilot.training.checks.buffers import BufferCheck, check_batch_norms
from ddpilot.training.checks.ddp_bypass import UnpreparedCheck
from ddpilot.training.checks.nonfinite import FiniteCheck
from ddpilot.training.combined import CombinedLoader
from ddpilot.training.coordination.collectives import gather_batch, gather_rows, rank_zero_first, reduce_value
from ddpilot.training.coordination.out_of_memory import explain_out_of_memory, find_sharing
from ddpilot.training.coordination.stop import FlagExchange, LoneBreakCheck, StopSignals
from ddpilot.training.evaluation.batch_norm import update_batch_norm
from ddpilot.training.evaluation.evaluate import evaluate, evaluate_step
from ddpilot.training.evaluation.predict import predict
from ddpilot.training.logs.logger import Logger
from ddpilot.training.logs.recorder import LogRecorder, Reduction
from ddpilot.training.logs.services import check_loggers
from ddpilot.training.logs.throughput import Throughput, TrainingClock
from ddpilot.training.losses import add_losses
from ddpilot.training.models.comm_hooks import Comm, hook_state, is_powersgd
from ddpilot.training.models.ddp import unwrap, wrap
from ddpilot.training.models.ddp_options import DDPOptions
from ddpilot.training.models.explain import Explanation, explain
from ddpilot.training.models.optimizers import (
    check_closure,
    clear_gradients,
    is_about_closure,
    needs_closure,
    step_scheduler,
)
from ddpilot.training.models.registry import OptimizerRecord, PreparedObjects
from ddpilot.training.models.sharding import (
    ParameterSharding,
    is_sharded,
    shard_optimizer_state,
    shard_parameters,
)
from ddpilot.training.models.shards import clip, clip_values, total_norm
from ddpilot.training.models.strategy import read_weights, strategy_of
from ddpilot.training.notices import empty_epoch_error, locating, no_samples_error, user_line, warn_findings
from ddpilot.training.options import CheckpointOptions, check_clipping, check_goal, check_numbers, naming_arguments
from ddpilot.training.progress import Progress, WaitClock
from ddpilot.training.resume.checkpointer import RunCheckpointer
from ddpilot.training.resume.failure_note import note_failures
from ddpilot.training.resume.position import RunPosition, describe_data
from ddpilot.training.resume.tracked_state import Redistribute, TrackedState, has_state
from ddpilot.training.step.accumulation import Accumulation
from ddpilot.training.step.accumulation_schedule import Accumulate, AccumulationSchedule
from ddpilot.training.step.averaging import Averaging, WeightAverage, WeightAverages
from ddpilot.training.step.closure import Evaluations
from ddpilot.training.step.local_sgd import LocalUpdates
from ddpilot.training.step.precision import Kind, Precision
from ddpilot.training.step.update import UpdateState


@locating
class Loop:
    """Primitives for a custom training loop with the same results at any world_size. Creating one is collective.

    `seed`: seeds weights created after this line (the same on every rank), the order of the data, and, together with
    the rank, dropout in each epoch. `accumulate`: number of batches per update; {0: 1, 5: 4}: 4 from epoch 5 on;
    {0: 1, "500 updates": 4}: 4 after 500 updates; or a function of (epoch, updates so far), the same on every rank.
    `precision`: "fp32" (leaves dtypes unchanged), "tf32" (the same, with TensorFloat-32 on CUDA devices), "bf16" or
    "fp16" (mixed), "bf16-true" (weights and optimizer state in 16 bits, too). `max_time_s`: seconds after which all
    ranks stop together, counted from the first `epochs` or `batches`; None: no limit.
    `check_finite`: raise NonFiniteError on all ranks if a loss is NaN or infinite (with fp16, updates that overflow are
    skipped instead). `backend`, `timeout_s`: arguments of `init_group`, which initialises or adopts the process group,
    also for a single rank. `group`: use this group instead.

    `checkpoint_dir`: a directory for this run only, in which a checkpoint is saved after each epoch and when all ranks
    stop within one; None: no checkpoints. `epochs` resumes from the latest checkpoint there, at any number of ranks;
    `resume=False` starts over and moves existing checkpoints to a different directory. `keep`: number of newest
    checkpoints to keep, None for all. `best`: "max acc" or "min loss"; the best checkpoint by that metric of `save` is
    kept as well. `save_every_s`, `save_every_updates`: also save within an epoch, after this many seconds or updates.
    `save_every`: "500 updates" or "2 epochs" (an int counts updates): save whenever the training has made a multiple of
    that, at the end and when all ranks stop, and not after each epoch. `checkpoint_dir` may be an fsspec URL, such as
    "s3://bucket/run7": rank 0 writes checkpoints to a local directory below `staging_dir` (see `CheckpointDir`) and
    uploads them in the background; each node downloads the one to resume from.

    `loggers`: one or several of `CsvLogger`, `JsonLinesLogger`, `TensorBoardLogger`, `WandbLogger` and `MLflowLogger`,
    which get what `log` is called with, in rows of `log_every` updates (default 50) and at the end of each pass.

    `progress`: rank 0 shows the progress of each epoch in `batches`, on stderr. None: a bar in a terminal or a
    notebook, also for ranks launched from one, and in logs a line every 30 seconds. True: always the bar. False: no
    output.

    Raises the errors of `init_group`, LoopError for invalid arguments, and CheckpointError on all ranks if the
    directory is not writable.
    """

    @naming_arguments("making a Loop")
    def __init__(
        self,
        seed: int = 0,
        *,
        accumulate: Accumulate = 1,
        precision: Kind = "fp32",
        max_time_s: float | None = None,
        check_finite: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        save_every_s: float | None = None,
        save_every_updates: int | None = None,
        save_every: int | str | None = None,
        resume: bool = True,
        staging_dir: str | os.PathLike[str] | None = None,
        loggers: Logger | Sequence[Logger] = (),
        log_every: int = 50,
        progress: bool | None = None,
        backend: str | None = None,
        timeout_s: float | None = None,
        group: GroupLike | None = None,
    ) -> None:
        check_numbers(seed=seed, max_time_s=max_time_s)
        self.group: GroupLike = init_group(backend, timeout_s) if group is None else group
        self.seed = seed
        self.findings: tuple[Finding, ...] = ()
        """Findings so far; each is reported once."""
        self.progress = Progress(progress, is_rank_zero=self.group.is_rank_zero)
        """The progress display of rank 0; `loop.progress.show(acc=0.9)` adds values to it."""
        self._num_epochs: int | None = None
        self._max_updates: int | None = None
        self._accumulation = AccumulationSchedule.parse(accumulate, "making a Loop")
        self._precision = Precision(precision, self.group.device, self.group.world_size)
        self._sharing = find_sharing(self.group)
        self._prepared = PreparedObjects()
        self._flags = FlagExchange(self.group, max_time_s)
        finite = FiniteCheck(self.group.device) if check_finite and precision != "fp16" else None
        self._updates = UpdateState(self._prepared, self.group, self._flags, finite)
        self._signals = StopSignals(self._flags.request)
        self._print_once = functools.cache(self.print)
        self._unprepared = UnpreparedCheck(self._prepared)
        self._lone_break = LoneBreakCheck(self.group)
        self._buffers = BufferCheck(self._prepared, self.group)
        self._averages = WeightAverages()
        self._open_pass: object | None = None
        self._data_clock = WaitClock()
        self._tracked = TrackedState()
        if self._precision.scaler is not None:
            self._tracked.add(self._precision.scaler, "scaler", optional=True)
        self._position = RunPosition(seed, self.group.rank, self.group.world_size, self._accumulation.saved)
        self._local = LocalUpdates(self.group, functools.partial(getattr, self._position, "num_updates"))
        options = CheckpointOptions(
            checkpoint_dir=checkpoint_dir,
            keep=keep,
            best=best,
            save_every_s=save_every_s,
            save_every_updates=save_every_updates,
            save_every=save_every,
            resume=resume,
            staging_dir=staging_dir,
        )
        self._checkpointer = RunCheckpointer(
            self.group, self._tracked, self._position, self._flags, self._before_read, options
        )
        self._make_trial = functools.partial(
            Loop, seed, accumulate=accumulate, precision=precision, check_finite=False, progress=False, group=self.group
        )
        self._clock = TrainingClock()
        rates = self._throughput()
        self.progress.speed = rates
        self._log = LogRecorder(
            self.group, check_loggers(loggers), log_every, self._throughput(), self._updates.count_behind, self._place
        )
        self._tracked.add(self._log, "logged", optional=True)
        note_failures(functools.partial(getattr, self._position, "num_updates"))
        seed_all(seed)

    def _next_group_size(self) -> int:
        """Return the number of batches of the update that begins here."""
        return self._accumulation.size_at(self.epoch, self.num_updates)

    def _before_read(self) -> None:
        """Raise NonFiniteError for earlier updates, and average weights that ranks update on their own. Collective."""
        self._updates.check_pending()
        self._local.average()

    def _throughput(self) -> Throughput:
        seen = functools.partial(getattr, self._position, "samples_seen")
        return Throughput(self.device, seen, functools.partial(getattr, self._data_clock, "total_s"), self._clock)

    def _place(self) -> tuple[int, int]:
        return self.epoch, self.num_updates

    def _join(self) -> None:
        """Before a collective call, wait for the other ranks to leave `batches` too, if this rank left it by `break`.

        Raises NonFiniteError on all ranks for an update before the `break`.
        """
        self._lone_break.wait()
        self._updates.complete_left()

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to `world_size` - 1."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank's models and batches."""
        return self.group.device

    @property
    def batch(self) -> CurrentBatch | None:
        """The current batch of `batches`, with its counts and the indices of this rank's samples; None outside."""
        return self._updates.batch

    @property
    def epoch(self) -> int:
        """The current epoch of `epochs`, or the one it will begin with; can be set.

        Outside of `epochs`, each further pass of `batches` over the same data is the next epoch.
        """
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._position.go_to(epoch)

    @property
    def next_batch(self) -> int:
        """Index of the batch from which the next `batches` starts: 0, unless all ranks stopped within an epoch."""
        return self._position.next_batch

    @next_batch.setter
    def next_batch(self, batch: int) -> None:
        self._position.next_batch = batch

    @property
    def num_updates(self) -> int:
        """Number of updates made by `step`, without skipped ones; one step of each of several optimizers is one update.

        The first step after a batch begins an update, and so does each further step of an optimizer of that update.
        """
        return self._position.num_updates

    @property
    def is_update(self) -> bool:
        """True for the last batch of an accumulation group, after which the weights are updated."""
        return self._updates.is_update

    @property
    def should_stop(self) -> bool:
        """True if all ranks have decided to stop. The same on every rank; not collective."""
        return bool(self._flags.reasons)

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Reasons for the stop, of "asked", "time", "SIGINT", "SIGTERM" and "SIGUSR1"; empty while there is none."""
        return self._flags.reasons

    @property
    def data_s(self) -> float:
        """Total seconds that this rank has waited for data in `batches`."""
        return self._data_clock.total_s

    @property
    def save_s(self) -> float:
        """Total seconds that this rank has waited for checkpoints, which are written in the background."""
        return self._checkpointer.held_up_s

    def start_at(self, epoch: int, *, next_batch: int = 0, num_updates: int = 0) -> None:
        """Start at this position with the current state of all objects, e.g. from an earlier loop. Not collective.

        A checkpoint is then resumed only if it has more than `num_updates` updates.
        """
        self._position.epoch, self._position.next_batch, self._position.num_updates = epoch, next_batch, num_updates
        self._checkpointer.first_update = num_updates

    def stop_by(self, signals: StopSignals) -> None:
        """Let `signals`, which may already be entered, request stops; signals received before count too.

        Not collective.
        """
        self._signals = signals
        signals.report_to(self._flags.request)

    def release_directory(self) -> None:
        """Allow other processes to write to the checkpoint directory, once pending writes are on disk. Not collective.

        The end of `epochs` releases it too. A later save locks it again.
        """
        self._checkpointer.release()

    def trial(self) -> Loop:
        """Return a new loop with the same seed, `accumulate`, precision and group, to try something on copies.

        It has no checkpoints, loggers or progress, and does not stop at losses that are not finite. Seeds the random
        states of this rank. Collective.
        """
        made: Loop = self._make_trial()
        return made

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the loop's precision; it does nothing for fp32.

        `accumulate` enters it itself.
        """
        return self._precision.autocast()

    def stop(self, *, everywhere: bool = False) -> None:
        """Request a stop of all ranks, from any of them: they stop after the same update or before the next epoch.

        Not collective. The update depends on when the ranks exchange their flags: about every 0.1 s, at most 32 updates
        later. `everywhere`: every rank calls this at the same point, for example after a given number of updates; all
        ranks then stop after exactly this update.
        """
        if everywhere:
            self._flags.agree("asked")
        else:
            self._flags.request("asked")

    def exchange_stop(self) -> bool:
        """Exchange stop requests now, after the step of an update. True if all ranks stop after it. Collective.

        Requests by `stop` before this call, on any rank, then take effect after exactly this update.
        """
        self._updates.exchange()
        return self.should_stop

    def print(self, *values: object, **options: Any) -> None:
        """Call `print` on rank 0, above the progress bar; does nothing on the other ranks."""
        if self.group.is_rank_zero:
            with self.progress.aside():
                print(*values, **options)  # noqa: T201  (that is what it is for)

    def rank_zero_first(self) -> AbstractContextManager[None]:
        """Context manager that runs its block on rank 0 first, then on the other ranks in parallel. Collective.

        If rank 0 raises, the other ranks raise RemoteRankError. Use it to download or preprocess data once.
        """
        return rank_zero_first(self.group)

    def prepare(
        self,
        *things: Any,
        comm: Comm | None = None,
        sync_every: int | None = None,
        sync_start: int = 0,
        shard: Literal["optimizer", "parameters"] | ParameterSharding | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        forward_sync_buffers: bool = False,
        sync_batch_norm: bool = False,
        **more: Any,
    ) -> Any:
        """Move models to the device and, with several ranks, wrap them in DDP; return all objects in order. Collective.

        `things`: models, optimizers, and objects to save with them: schedulers, an `AveragedModel`, anything with
        `state_dict` and `load_state_dict`; one object is returned alone, several as a tuple. Weights and buffers are
        broadcast from rank 0. A returned model has the methods of the original, which run as forward passes of DDP.
        `explain` reports the chosen options and their reasons.

        `comm`: "bf16" or "fp16": all-reduce gradients in 16 bits; "powersgd" or a `PowerSGD`: as thin matrices, with
        error feedback; or a communication hook of DDP, or (state, hook). `sync_every`: local SGD: do not all-reduce
        gradients after the first `sync_start` updates, and average the weights every so many updates, at the end of a
        pass and before they are read. `shard="optimizer"`: each rank keeps the optimizer state of its share of the
        parameters only (ZeroRedundancyOptimizer); use the returned optimizer. `shard="parameters"`, or a
        `ParameterSharding`: a shard of parameters, gradients and state (FSDP2 instead of DDP).
        `find_unused_parameters`: updates may leave parameters unused; None: the variable DDP_FIND_UNUSED_PARAMETERS,
        False if it is not set. `static_graph`: all updates of the training use the same parameters in the same way.
        `bucket_cap_mb`: bucket size in MiB; None: DDP's 25. `gradient_as_bucket_view`: no second copy of gradients.
        `forward_sync_buffers`: rank 0's buffers are broadcast in forward passes too, of which every rank then has to
        run equally many. `sync_batch_norm`: BatchNorm statistics over all ranks, on GPUs only. `more`: further
        arguments of DistributedDataParallel.

        Raises LoopError for objects of other types, for a DDP model, for options that DDP does not have or that a model
        or an optimizer does not support, and for `sync_batch_norm` on the CPU.
        """
        returned = []
        options = DDPOptions(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            forward_sync_buffers=forward_sync_buffers,
            comm=comm,
            sync_every=sync_every,
            sync_start=sync_start,
            shard=shard,
            sync_batch_norm=sync_batch_norm,
            more=more,
        )
        earlier = tuple(self._prepared.optimizers)
        if self._precision.scaler is not None and is_powersgd(options.comm):
            found = '`comm="powersgd"` with `precision="fp16"`, whose scale changes between updates'
            raise LoopError("preparing a model", found=found, fix="Use precision='bf16', or leave `comm` out.")
        if self._precision.scaler is not None and sync_every is not None:
            found = '`sync_every` with `precision="fp16"`, whose ranks would skip different updates'
            raise LoopError("preparing a model", found=found, fix="Use precision='bf16', or leave `sync_every` out.")
        for thing in things:
            if isinstance(thing, nn.Module) and not isinstance(thing, AveragedModel):
                self._precision.cast_weights(thing)
        if options.sharding is not None:
            self._shard_models(things, options.sharding)
        for thing in things:
            returned.append(self._prepare_thing(thing, options))
            if isinstance(returned[-1], Optimizer):
                for old in self._prepared.replace_optimizers(earlier, returned[-1]):
                    self._tracked.replace(old, returned[-1])
            self._tracked.add(returned[-1])
            own = self._prepared.find(returned[-1])
            if own is not None and own.ddp is not None:
                self._tracked.add_of_rank(hook_state(own.ddp), f"{self._tracked.name_of(own.model)}_comm")
        if self._local.is_on:
            for optimizer in self._prepared.optimizers:
                self._tracked.add_of_rank(optimizer, self._tracked.name_of(optimizer))
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _shard_models(self, things: tuple[Any, ...], sharding: ParameterSharding) -> None:
        did = 'preparing with `shard="parameters"`'
        if self._precision.scaler is not None:
            found = 'a Loop with `precision="fp16"`, whose scaled gradients would be sharded'
            raise LoopError(did, found=found, fix="Use precision='bf16', or ParameterSharding(param_dtype=...).")
        for model in things:
            if isinstance(model, nn.Module) and not isinstance(model, AveragedModel):
                shard_parameters(model, self.group, sharding, self._prepared.moved)

    def _prepare_thing(self, thing: Any, options: DDPOptions) -> Any:
        if isinstance(thing, AveragedModel):
            if options.sharding is not None or self._prepared.has_sharded:
                found = "an AveragedModel with a model whose parameters are sharded"
                raise LoopError("preparing", found=found, fix='Leave it out, or leave out `shard="parameters"`.')
            move(thing, self.device)
            self._local.add_average(thing)
            return thing
        if isinstance(thing, nn.Module):
            model, choices = wrap(thing, self.group, options)
            prepared = self._prepared.add_model(model, choices)
            self._updates.add_model(prepared)
            if prepared.ddp is not None and options.sync_every is not None:
                self._local.add(prepared.ddp, options.sync_every, options.sync_start)
                self._updates.let_ranks_differ()
            self._buffers.add(prepared)
            return model
        if isinstance(thing, Optimizer):
            shard_optimizer_state(thing, self._prepared.moved)
            if options.shard == "optimizer":
                from ddpilot.training.models.zero import shard_optimizer  # slow to import

                thing = shard_optimizer(thing, self.group)
            self._prepared.add_optimizer(thing)
            self._updates.add_optimizer(thing)
            return thing
        if has_state(thing):
            if isinstance(thing, ReduceLROnPlateau):
                self._updates.keep_objective()
            return thing
        raise LoopError(
            "preparing",
            found=f"a {type(thing).__name__}",
            fix="Pass models, optimizers and other objects with a state_dict; pass datasets to loop.loader().",
        )

    def average(self, model: nn.Module, how: Averaging | float) -> WeightAverage:
        """Return an average of the weights of the prepared `model` that the loop updates and saves. Not collective.

        `how`: the decay of an exponential moving average (EMA), or an `Averaging`, for an equal one (SWA), a start, and
        an interval. Within `batches` it is updated after the steps of each batch or accumulation group that changed the
        weights, or at the end of the first pass of each epoch; outside call its `update_parameters(model)`. Evaluate it
        as any model, and call `update_batch_norm` first if it is an equal average of a model with BatchNorm. Raises
        LoopError for a model that was not prepared or whose parameters are sharded.
        """
        inner = unwrap(model)
        did = "averaging weights"
        if all(one.module is not inner for one in self._prepared.models):
            found = f"a {type(inner).__name__} that was not prepared"
            raise LoopError(did, found=found, fix="Write model = loop.prepare(model) first.")
        if is_sharded(inner):
            raise LoopError(
                did, found="a model whose parameters are sharded", fix='Prepare it without shard="parameters".'
            )
        average = WeightAverage(inner, how if isinstance(how, Averaging) else Averaging(decay=how))
        self._tracked.add(average)
        self._averages.add(average, inner)
        self._local.add_average(average)
        return average

    def update_batch_norm(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        max_batches: int | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Compute the statistics of the BatchNorm layers of `model` over the batches of `loader`. Collective.

        For averaged weights, whose statistics are not those of any model that was trained; as torch's `update_bn`, with
        the batches of all ranks: the same statistics at any number of ranks. The model runs in train mode without
        gradients. `max_batches`: at most these many. `forward`: as for `predict`. Random states are restored.
        Raises LoopError for a batch with a single value per channel, and for a model whose parameters are sharded.
        """
        self._join()
        self._averages.settle(self.num_updates, self.epoch)
        options: dict[str, Any] = {"epoch": self.epoch, "max_batches": max_batches, "forward": forward}
        with self.autocast():
            update_batch_norm(model, self._divided(loader), self.group, **options)

    def explain(self) -> Explanation:
        """Report the options chosen by `prepare`, with their reasons and costs, and proposals. Collective.

        The report uses what DDP has recorded on all ranks: after about ten updates it includes times, and proposals for
        `find_unused_parameters`, `static_graph` and the all-reduce. Proposals are not applied automatically: a branch
        may be taken later, or on one rank only. The result is the same on every rank; show it with
        `loop.print(loop.explain())`.
        """
        return explain(self._prepared, self.group, self._next_group_size(), self._tracked.name_of)

    def profile(self) -> RunningProfile:
        """Return a context manager that measures where the time of the updates in it goes. Collective on exit.

        After the `with` block every rank has the profile of all ranks: ``loop.print(profile)`` shows it on rank 0,
        ``profile.to_html(path)`` writes the report with its pictures. If a rank made fewer than 6 updates, both state
        it instead, and ``profile.profile`` raises RecordError.
        """
        return RunningProfile(self.group, self._prepared.ddp_models)

    def loader(self, dataset: Any, **options: Any) -> MapLoader | StreamLoader | ShardLoader:
        """Return a loader of this rank's samples of `dataset`, map-style, iterable or of shards; not collective.

        `options`: `global_batch_size` (samples of all ranks) or `batch_size_per_rank`, `shuffle`, `drop_last`,
        `batch_split`, `weights`, `num_workers` and others; see the table in docs/how_to/data.md. Raises DataError for
        invalid and unknown options, and LoopError for a DataLoader.
        """
        if isinstance(dataset, DataLoader):
            raise LoopError(
                "making a loader",
                found="a DataLoader instead of a dataset",
                fix="Write loop.prepare_data_loader(loader), which divides it among the ranks.",
            )
        job = {"rank": self.rank, "world_size": self.world_size, **self._with_seed(options)}
        make: Any = make_stream_loader if isinstance(dataset, IterableDataset) else make_loader
        if is_dataset_of_shards(dataset):
            make = make_shard_loader
        return make(dataset, **job)  # type: ignore[no-any-return]

    def prepare_data_loader(self, loader: DataLoader[Any], **options: Any) -> MapLoader | StreamLoader:
        """Return this rank's loader for an existing DataLoader, with the batches of one process; not collective.

        Its `batch_size` counts the samples of all ranks, which is reported once; with `batch_size_per_rank=True`, those
        of each rank. `options`: also `batch_split`, `seed`, `divides_itself` and `seed_samples`; see docs/how_to/data.md.
        Raises DataError.
        """
        job = {"rank": self.rank, "world_size": self.world_size, "say": self._print_once, **self._with_seed(options)}
        return prepare_data_loader(loader, **job)

    def _with_seed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "seed": self.seed} if options.get("seed") is None else dict(options)

    def epochs(self, num: int | None = None, *, max_updates: int | None = None) -> Iterator[int]:
        """Yield the epoch numbers from `epoch` to `num` - 1, until all ranks decide to stop. Collective.

        `max_updates`: end after this many updates in total, also within an epoch, in the middle of a long or endless
        stream; `num` may then be None. A later call, with a larger number, continues within that epoch.

        With a `checkpoint_dir` it resumes from the latest checkpoint, also within an epoch, and saves one after each
        epoch; when it ends, the last one is on disk. SIGTERM and SIGUSR1 then save a checkpoint and raise
        SystemExit(75) on all ranks, so that a scheduler can requeue the job. Raises LoopError without `num` and
        `max_updates`, and, if `num` is None, for an epoch without samples, after which training would never end.
        """
        check_goal(num, max_updates)
        self._position.begin_epochs()
        self._checkpointer.begin()
        self._averages.count_from(self.num_updates)
        self._flags.start()
        self._num_epochs, self._max_updates = num, max_updates
        try:
            with self._signals, self._checkpointer.in_epochs(), self._log.closing():
                self._checkpointer.report_if_finished(num, max_updates)
                yield from self._yield_epochs(num)
                self._log.finish()
        finally:
            self._max_updates = None

    def _yield_epochs(self, num: int | None) -> Iterator[int]:
        while not self._has_all_updates() and (num is None or self.epoch < num):
            self._join()
            self._updates.exchange_between_epochs()
            if self.should_stop:
                self._checkpointer.save_skipped()
                self._checkpointer.leave()
                return
            self._position.begin_epoch()
            before = -1 if self.next_batch else self._position.samples_seen
            yield self.epoch
            if self.next_batch:  # stopped within the epoch and saved there: a later run resumes it
                return
            if num is None and self._position.samples_seen == before and not self.should_stop:
                raise empty_epoch_error(self.epoch, self._max_updates)
            is_last = self._has_all_updates() or (num is not None and self.epoch + 1 >= num)
            self._checkpointer.end_epoch(is_last=is_last)
        self._join()
        self._checkpointer.wait()

    def _has_all_updates(self) -> bool:
        """True if the `max_updates` of `epochs` have been made."""
        return self._max_updates is not None and self.num_updates >= self._max_updates

    def batches(
        self,
        loader: Loader,
        *more: Loader,
        ends: Literal["shortest", "longest"] = "shortest",
        weights: Sequence[float] | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of every batch of the epoch, on the device. Collective.

        Several loaders are read in step: each batch is a tuple with one of each. `ends`: the epoch ends with the
        "shortest" loader, or with the "longest", and shorter ones are repeated, each time in a new order. Call
        `backward((loss_a, loss_b))`: each loss is weighted by the samples of its own loader. `weights`: each batch is
        from one loader instead, drawn with a probability in proportion to its weight, the same on every rank;
        `loop.batch.source` is its index. `ends` then applies to the first or the last loader that is used up.

        A rank without samples in a batch gets zero rows and takes part in the forward pass; a prepared model runs dummy
        rows if it cannot run zero rows. Outside of `epochs`, each further pass over the same data is a new epoch with a
        new order. Every rank iterates to the end or to the joint stop, which is after an update, the same on all ranks;
        further passes of that epoch are empty. SIGINT, SIGTERM and SIGUSR1 stop all ranks after the current update; a
        second SIGINT stops at once. Raises NonFiniteError on all ranks, and LoopError before the first batch if
        `loader` was not made by `loader` or `prepare_data_loader`, and if BatchNorm would get a part of fewer than two
        samples.
        """
        if more or weights is not None or ends != "shortest":
            with naming_rank(self.rank):
                loader = CombinedLoader((loader, *more), ends=ends, weights=weights, seed=self.seed)
        if not self._begin_pass(loader):
            return
        groups = self._data_clock.over(
            iterate_groups(
                loader,
                self.group,
                epoch=self.epoch,
                first_batch=self.next_batch,
                accumulation=self._accumulation.constant or self._next_group_size,
                stream_state=self._position.stream_state(self.next_batch),
            )
        )
        updates = None if self._max_updates is None else (self.num_updates, self._max_updates)
        shown = self.progress.epoch(self.epoch, self._num_epochs, self.next_batch, loader, updates)
        self._log.begin_pass()
        this = self._open_pass = object()
        device = self.device
        try:
            with self._signals, shown:
                for batch in groups:
                    self._updates.enter(batch)
                    if batch.data is None:
                        raise no_samples_error(batch)
                    try:
                        yield to_device(batch.data, device)
                    except GeneratorExit:
                        self._leave_pass(batch, this)
                        raise
                    if self._open_pass is not this:
                        self._check_pass(this)
                    self.progress.advance(is_update=batch.is_last)
                    if batch.has_empty_rank:
                        self._updates.share_buffers()
                    if not batch.is_last:
                        continue
                    is_end = is_at_end(loader, batch)
                    is_cut = self._has_all_updates() and not is_end
                    self._end_update(batch, leaves=is_cut, is_end=is_end)
                    if is_cut or (self._flags.reasons and not is_end and self._local.is_equal):
                        self._updates.check_pending()
                        self.next_batch = batch.index + 1
                        break
                else:
                    self._before_read()
                    self._log.end_pass()
                    is_empty = self.next_batch and self._updates.batch is None
                    if is_empty and "dataset_length" not in describe_data(loader):
                        self._checkpointer.report_nothing_left()
                    if self._position.is_first_pass:
                        self._averages.after_epoch(self.num_updates, self.epoch + 1)
                    self._position.end_pass()
                    self._report_findings(self._buffers.end_pass())
                self._updates.leave()
        finally:
            if self._open_pass is this:
                self._open_pass = None

    def _end_update(self, batch: CurrentBatch, *, leaves: bool, is_end: bool) -> None:
        """Finish an accumulation group after its last batch; `leaves`: True if the pass ends here, before its end.

        `is_end`: True if this is known to be the last batch. Collective if an exchange, comparison, average or
        checkpoint is due.
        """
        self._updates.complete()
        if self._averages.pairs:
            self._averages.after_update(self.num_updates, self.epoch)
        if self._precision.scaler is not None:
            self._precision.settle()
        self._position.samples_seen += batch.group_count
        self._position.note_stream(batch.index + 1, batch.stream_state)
        if self._buffers.is_waiting and self._updates.has_backward:
            self._report_findings(self._buffers.after_update())
        if self._updates.has_backward:
            self._checkpointer.note_trained()
        self._local.after_update(ends=leaves or is_end)
        self._log.end_update(ends=leaves)
        stops = leaves or (bool(self._flags.reasons) and self._local.is_equal)
        self._checkpointer.after_update(batch.index + 1, leaves=stops, may_save=self._local.is_equal)

    def _leave_pass(self, batch: CurrentBatch, this: object) -> None:
        """Handle a loop over `batches` that ended by `break` or an exception, or whose generator was closed."""
        if self._open_pass is this:
            self._averages.after_update(self.num_updates, self.epoch)
            self._position.end_pass()
            self._lone_break.note(batch, user_line(), drops=self._updates.drop_unfinished())

    def _check_pass(self, this: object) -> None:
        """Raise LoopError if a second pass over `batches` began after `this` one and is still open."""
        if self._open_pass is None:  # the second pass has ended, within a batch of this one
            self._open_pass = this
            return
        raise LoopError(
            "reading the next batch",
            found="a second loop.batches() began before this one ended, so losses were weighted by its samples",
            fix="Iterate over both in one pass: `for x, y in loop.batches(a, b)`, with ends='longest' to repeat the "
            "shorter one.",
        )

    def _report_findings(self, found: tuple[Finding, ...]) -> None:
        warn_findings(new := tuple(one for one in found if one not in self.findings), self.group)
        self.findings += new

    def _begin_pass(self, loader: Loader) -> bool:
        check_loader(loader)
        if self._has_all_updates() or (self.should_stop and self.next_batch):
            return False  # an earlier pass of this epoch made the last update, or stopped where the epoch resumes
        if not self._checkpointer.is_in_epochs:
            is_next = self._position.is_next_epoch(loader)
            if is_next and self.should_stop:
                return False
            if is_next:
                self._checkpointer.note_next_epoch()
                self._position.begin_epoch_outside()
        self._join()
        self._lone_break.begin_pass()
        self._updates.share_buffers()
        self._unprepared.begin_pass()
        found = check_batch_norms(self._prepared, loader)
        with naming_rank(self.rank):
            is_open = self._position.begin_pass(loader, self.device)
        self._report_findings(found)
        if is_open:
            self._averages.count_from(self.num_updates)
            self._flags.start()
            self._checkpointer.report_resumed()
        return is_open

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context manager for the forward and backward pass of one batch.

        Gradients are all-reduced only with the last batch of an accumulation group. Pass the prepared models for which
        the backward pass inside computes gradients. Raises LoopError for models that were not prepared, at any number
        of ranks, and if the forward pass bypassed DDP, so that gradients were not all-reduced. Raises OutOfMemoryError
        if memory runs out inside, on this rank only: the other ranks end as after any error of one rank.
        """
        self._unprepared.check_models(models)
        return Accumulation(models, self._updates, self._precision, self.group, self._sharing)

    def backward(
        self,
        loss: torch.Tensor
        | Sequence[torch.Tensor]
        | Mapping[str, torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]],
        count: float | None = None,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of this rank's mean `loss`, weighted so that the update uses the mean over all samples.

        `loss`: a scalar, the mean over this rank's samples of the batch; a rank without samples contributes exact
        zeros, even if its loss is NaN. `count`: number of items that the mean is over, if they are not samples (tokens,
        boxes); it costs a small collective. For several losses that are means over different items, pass a mapping,
        such as `{"box": (loss, num_boxes), "class": loss}`: one backward pass and one small collective; every rank
        passes the same names, with a count of 0 for an empty mean (which may be NaN). For `batches` of several loaders
        in step, pass a tuple with a mean over the samples of each; it costs no collective. Collective with the last
        batch of an accumulation group, and with a count or several named losses. Raises LoopError for invalid losses
        and counts, and for a mean cross entropy with class weights or ignored targets without its count.
        """
        scaler = self._precision.scaler
        if scaler is not None:
            self._precision.settle_overflow(self._prepared.optimizers)
        self._updates.backward(loss, count, scaler, retain_graph)
        if self.progress.is_shown:
            self.progress.note_loss(add_losses(loss))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip the gradient norm to `max_norm` and return the norm before clipping. Not collective, unless sharded.

        `norm_type`: above 0, or inf for the largest element. Call it for the parameters of each group of an optimizer
        to clip them separately. Returns None, without clipping, while gradients are being accumulated. Raises
        NonFiniteError, on all ranks alike, if the norm is not finite; fp16 skips the update of every optimizer that
        holds one of `parameters`. Raises LoopError for limits and norm types that are not above 0.
        """
        check_clipping("clipping gradients", max_norm=max_norm, norm_type=norm_type)
        given = self._begin_clipping(parameters)
        if given is None:
            return None
        norm = total_norm([p.grad for p in given if p.grad is not None], norm_type)
        self._updates.check_norm(given, norm)  # clipping by a NaN norm would make all gradients NaN
        self._precision.note_norm(given, self._prepared.optimizers, norm)
        clip(given, max_norm, norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each element of the gradients to at most `clip_value` in size. Not collective, unless sharded.

        Does nothing while gradients are being accumulated. Raises NonFiniteError, on all ranks alike, for a gradient
        that is not finite, which clipping would hide; with fp16 its update is skipped. Raises LoopError for a limit
        that is not above 0.
        """
        check_clipping("clipping gradients", clip_value=clip_value)
        given = self._begin_clipping(parameters)
        if given is not None:
            self._updates.check_norm(given)
            clip_values(given, clip_value)

    def _begin_clipping(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor] | None:
        """Complete and unscale the gradients of `parameters` and return these; None within an accumulation group."""
        if not self.is_update:
            return None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._updates.complete()
        self._precision.unscale(given, self._prepared.optimizers)
        return given

    def step(
        self,
        optimizer: Optimizer,
        scheduler: Any = None,
        *,
        closure: Callable[[], object] | None = None,
        ahead: bool = False,
    ) -> bool:
        """Step the optimizer, clear its gradients and step `scheduler`. True if the weights were updated. Collective.

        Returns False, without an update, while gradients are being accumulated; also if fp16 skips the update, on all
        ranks alike. Raises NonFiniteError on all ranks, on the CPU before anything is updated. On an accelerator the
        host does not wait: the optimizer gets zeros in place of gradients that are not finite, so the weights remain
        finite, and the error is raised once the ranks have exchanged their flags, about 0.1 s later (at most 32
        updates, and always before the end of the epoch, an evaluation and a save; after a `break` by the next
        collective call of the loop other than `step`). A backward pass after the error starts without gradients. Raises
        LoopError, at any number of ranks, for parameters that belong to no prepared model, and in `batches` for
        gradients without any `loop.backward`, and for gradients of a backward pass before the last step of a different
        optimizer, which that step did not clear, added to later ones; with several ranks also for gradients of a
        forward pass that bypassed DDP. If that is intended, call `optimizer.step()`.

        `scheduler`: a ReduceLROnPlateau gets the update's mean loss over all ranks; it has to be prepared. `closure`:
        for optimizers that compute the loss several times per update (LBFGS, SAM): a function that runs forward and
        `loop.backward`. Gradients are cleared before each call, and the optimizer gets the loss over all ranks,
        whatever the closure returns, so all ranks take the same steps; this costs a small collective per call. Not
        supported with `accumulate` > 1 or fp16. A NonFiniteError leaves the weights at the optimizer's current trial
        point. `ahead`: call it once before the optimizer steps, for those that read gradients before they call their
        closure (SAM, as it is usually written); the optimizer's first call is then not a second evaluation, unless the
        weights were changed before it.
        """
        if not self._updates.is_update:
            return False
        if not hasattr(optimizer, "param_groups"):
            found = f"a {type(optimizer).__name__} in place of an optimizer"
            raise LoopError("updating the weights", found=found, fix="Write loop.step(optimizer).")
        if closure is not None and self._local.is_on:
            found = "a closure with `sync_every`, so each rank would step by its own loss"
            raise LoopError("updating the weights", found=found, fix="Prepare the model without `sync_every`.")
        own = self._prepared.record_of(optimizer)
        self._unprepared.check_optimizer(optimizer, own)
        self._updates.check_step(optimizer, own, has_closure=closure is not None)
        try:
            done = self._update(optimizer, own, closure, ahead)
        except (RuntimeError, MemoryError) as error:  # an optimizer allocates its state in its first step
            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(error, self.group, self._sharing, self._updates.batch) from error
        clear_gradients(optimizer)
        if self._prepared.has_sharded:
            for prepared in self._prepared.models:
                prepared.settle()
        self._updates.after_step(optimizer, own)
        if self._updates.batch is None:
            self._precision.settle(self._prepared.optimizers)
        if done and scheduler is not None:
            step_scheduler(scheduler, self._updates.objective)
        if done:
            self._local.note_step()
        if done and self._updates.begins_update(optimizer):
            self._position.num_updates += 1
        if self._updates.batch is None:
            self._local.after_update(ends=False)
        return done

    def _update(
        self, optimizer: Optimizer, own: OptimizerRecord, closure: Callable[[], object] | None, ahead: bool
    ) -> bool:
        if closure is not None:
            check_closure(optimizer, self._accumulation.largest, self._precision.scaler is not None, ahead=ahead)
            return self._precision.step(optimizer, Evaluations(self._updates, closure, optimizer, ahead=ahead))
        self._updates.protect(own.parameters)
        try:
            return self._precision.step(optimizer)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            if is_out_of_memory(error) or not is_about_closure(error):
                raise
            raise needs_closure(optimizer) from error

    def reduce(
        self, value: Any, op: Literal["mean", "sum", "min", "max"] = "mean", *, count: float | None = None
    ) -> torch.Tensor:
        """Reduce `value`, a number or a tensor of the same shape on all ranks, over all ranks. Collective.

        "mean" weights each rank by `count`, which defaults to its number of samples in the current batch: the mean of
        the ranks' local losses is then the mean over all samples. Outside of `batches` the default is 1, except for the
        loss tensor that `backward` was last called with, whose batch still determines it.
        """
        self._join()
        weight = self._updates.count_behind(value) if count is None else count
        return reduce_value(value, op, weight, self.group)

    def log(
        self,
        values: Mapping[str, Any],
        *,
        reduce: Reduction = "mean",
        per_s: Mapping[str, float] | None = None,
    ) -> None:
        """Log `values` by name to the `loggers`, over all ranks. Call it on every rank.

        In `batches` it is not collective, and does not wait for the device. A row has, after `log_every` updates, the
        mean since the last row over all samples of all ranks: each value is this rank's mean of the batch, weighted by
        its samples as in `reduce`, or (mean, count of what the mean is over). `reduce`: "sum", "min" or "max" over
        batches and ranks, or "last", the latest value of rank 0, e.g. for a learning rate. `per_s`: amounts of this
        batch on this rank, whose sum over all ranks is divided by the time: `{"tokens": n}` is logged as
        "tokens_per_s". With `{"flops": n}` also "mfu", the share of the devices' peak, where it is known; see
        `peak_flops`. Each row has "epoch", "update", "samples_per_s", "data_wait" (share of the time that the slowest
        rank waited for data) and "memory_gib" (peak, on accelerators), without the time of evaluations.

        Outside of `batches` the values become a row at once, and it is collective. Values without a count have to be
        equal on all ranks, as those of `evaluate` are. Raises LoopError, on all ranks, if they are not, since a mean of
        ranks' means would be wrong.

        A run that resumes continues the logs from the checkpoint, without duplicate rows. An exception of a logger is
        raised on all ranks, with the next row at the latest. Raises LoopError for a value that is not a number.
        """
        if self._updates.batch is not None:
            self._log.add(values, reduce, per_s or {}, has_samples=self._updates.batch.count > 0)
            return
        if per_s:
            found = "`per_s` outside of `batches`, where no time is measured"
            raise LoopError("logging values", found=found, fix="Log it for each batch.", rank=self.rank)
        self._join()
        self._log.log_outside(values, reduce)

    def take_logged(self) -> dict[str, float]:
        """Return what `log` was called with since the last call, over all ranks, with rates. Collective.

        For a loop without `loggers`; the values are the same on every rank.
        """
        self._join()
        return self._log.take()

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of this rank's device, for "mfu"; None: the dense 16-bit peak, if the device is known.

        Can be set.
        """
        return self._log.peak_flops

    @peak_flops.setter
    def peak_flops(self, peak: float | None) -> None:
        self._log.peak_flops = peak

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks in rank order, on every rank, on the CPU. Collective.

        `data`: tensors with any number of rows on each rank, tuples and dicts of them, or lists.
        """
        self._join()
        return gather_rows(data, self.group)

    def gather_batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, on every rank, and the index of this rank's first row. Collective.

        For losses that compare the samples of a batch with each other: the gradients of all ranks' losses flow back to
        the rank that each row comes from. `rows`: (n, ...) on the device, of any dtype, with any n on each rank,
        including 0; returns (sum of n, ...) in rank order. The backward pass is collective as well. Raises LoopError on
        all ranks if the shapes of a row or the dtypes differ.
        """
        self._join()
        return gather_batch(rows, self.group)

    def evaluate(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
        step: Callable[[nn.Module, Any], Any] | None = None,
    ) -> dict[str, Any]:
        """Return the value of each metric over all samples of `loader`, the same on every rank. Collective.

        Each sample counts once. `loader`: a loader made by `loader` or `prepare_data_loader`, or a plain DataLoader,
        which is divided here. `metrics`: maps a name to a torchmetrics object (which is not changed) or to a function
        of (output, target) that returns a value per sample, the batch's mean, or (mean, count of items in the mean); or
        a torchmetrics MetricCollection. The value is NaN without samples. The model runs unwrapped, in eval mode, with
        rank 0's buffers, and not at all on a rank without samples. `forward(model, batch)` returns the arguments of the
        metrics; default: `(model(*batch[:-1]), batch[-1])`, or `(model(**batch), batch)` for a mapping. Random
        states are restored.

        `step(model, batch)`, in place of metrics, computes everything itself and returns a dict of values, each as a
        function in `metrics` returns it; a value alone is named "loss". It is not called on ranks without samples.

        Raises NonFiniteError on all ranks for an earlier update that has not been reported yet, and LoopError unless
        one of `metrics` and `step` is given.
        """
        if (metrics is None) == (step is None) or (step is not None and forward is not None):
            is_none = metrics is None and step is None
            found = "neither `metrics` nor `step`" if is_none else "`step` next to `metrics` or `forward`"
            raise LoopError("evaluating", found=found, fix="Give `metrics`, with `forward` if needed; or `step` alone.")
        self._join()
        self._before_read()
        self._checkpointer.report_resumed()
        self._averages.settle(self.num_updates, self.epoch)
        with self.autocast(), self._clock.paused():
            if step is not None:
                return evaluate_step(model, self._divided(loader), step, self.group)
            return evaluate(model, self._divided(loader), metrics, self.group, forward)

    def predict(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        to: str | os.PathLike[str] | None = None,
        on_all_ranks: bool = False,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """Return the model's outputs for all samples of `loader`, in dataset order, on rank 0. Collective.

        `loader`: a loader made by `loader` or `prepare_data_loader`, or a plain DataLoader, which is divided here.
        Outputs: tensors with a row per sample, tuples and dicts of them, or a list with an object per sample; on the
        CPU. None on the other ranks, unless `on_all_ranks`, and if there are no samples. `to`: a directory that rank 0
        writes batch by batch, so that memory holds only one batch; read it with `read_predictions`; its path is
        returned on every rank. `forward(model, batch)`: default `model(*batch[:-1])` for a tuple, `model(batch[0])` for
        one item, `model(**batch)` for a mapping, `model(batch)` for anything else. Raises NonFiniteError on all ranks
        for an earlier update that has not been reported yet.
        """
        self._join()
        self._before_read()
        self._checkpointer.report_resumed()
        self._averages.settle(self.num_updates, self.epoch)
        with self.autocast(), self._clock.paused():
            return predict(model, self._divided(loader), self.group, to=to, on_all_ranks=on_all_ranks, forward=forward)

    def _divided(self, loader: Loader | DataLoader[Any]) -> Loader:
        if not isinstance(loader, DataLoader):
            return loader
        # The batch size does not affect results here, so its meaning is not reported; ranks may also get no samples.
        return prepare_data_loader(loader, rank=self.rank, world_size=self.world_size, seed=self.seed, empty_ranks=True)

    def track(self, *, per_rank: bool = False, redistribute: Redistribute | None = None, **things: Any) -> None:
        """Save and restore `things` with the checkpoints, each under its keyword's name; not collective.

        Accepts anything with `state_dict` and `load_state_dict` that is not passed to `prepare`, and prepared objects
        to name them: `loop.track(generator=gen)`. Only the state of rank 0 is saved.

        `per_rank=True`: each rank saves and restores its own, such as the carried state of an RNN or a replay buffer;
        every rank tracks the same names. Resuming at another number of ranks then raises MismatchedCheckpointError on
        all ranks, unless `redistribute(states, rank, world_size)` returns the state of a rank from those of all ranks
        before, in their order. Raises LoopError for other objects, and for models and optimizers with `per_rank`.
        """
        if redistribute is not None and not per_rank:
            found = "`redistribute` without `per_rank=True`"
            raise LoopError("tracking objects", found=found, fix="Pass per_rank=True, or leave it out.", rank=self.rank)
        for name, thing in things.items():
            if per_rank:
                self._tracked.add_per_rank(thing, name, redistribute)
            else:
                self._tracked.add(thing, name)

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint; `metrics` are used to choose the best one. Collective: every rank calls it.

        Within `batches`, it is saved after the current update; in the rest of an epoch, with the checkpoint at the end
        of the epoch; elsewhere at once, and it is on disk on return. Write errors are reported on stderr and do not
        stop the training. Raises LoopError without a `checkpoint_dir`.
        """
        self._checkpointer.request(metrics, in_batch=self._updates.batch is not None)

    def resume(self, *, other_data: bool = False) -> bool:
        """Resume from the latest intact checkpoint. True if there is one. Collective.

        `epochs` calls it automatically: call it to have the weights earlier. Restores everything that was prepared or
        tracked, and the position in the data; rank 0 reports the position on stderr when training or an evaluation
        begins. `other_data`: True accepts a dataset of a different length at the start of an epoch. Raises
        CorruptCheckpointError if no checkpoint is intact, and MismatchedCheckpointError, on all ranks and without any
        change, if it belongs to a different run.
        """
        is_resumed = self._checkpointer.resume(other_data=other_data)
        self._averages.count_from(self.num_updates)
        return is_resumed

    def load(self, model: nn.Module, path: str | os.PathLike[str], *, name: str = "model") -> None:
        """Load weights only, from a file or a checkpoint directory, into `model`, on its own device. Collective.

        `path`, `name`: as for `load_weights`. Raises its errors, on all ranks if one of them fails; no model is changed
        then.
        """
        self._checkpointer.wait()
        inner = getattr(model, "_orig_mod", model)
        if is_sharded(inner):
            load_shards_jointly(inner, path, name, self.group, strategy_of(inner).load_weights, read_weights)
        else:
            load_jointly(model, path, name, self.group)
