# SPDX-License-Identifier: Apache-2.0
"""`LoopBase`: the components and properties of a `Loop`, and its setup methods: prepare, explain, loader, shard."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.data.loaders import make_loader, make_stream_loader, shard_loader
from ddpilot.data.map_loader import MapLoader
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.group.device import move
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import CurrentBatch
from ddpilot.training.checks.buffers import BufferCheck
from ddpilot.training.checks.ddp_bypass import UnpreparedCheck
from ddpilot.training.checks.nonfinite import FiniteCheck
from ddpilot.training.coordination.collectives import rank_zero_first
from ddpilot.training.coordination.out_of_memory import find_sharing
from ddpilot.training.coordination.stop import FlagExchange, LoneBreakCheck, StopSignals
from ddpilot.training.models.ddp import wrap
from ddpilot.training.models.ddp_options import DDPOptions
from ddpilot.training.models.explain import Explanation, explain
from ddpilot.training.models.registry import PreparedObjects
from ddpilot.training.notices import locating
from ddpilot.training.options import CheckpointOptions, check_numbers, naming_options
from ddpilot.training.progress import Progress, WaitClock
from ddpilot.training.resume.checkpointer import RunCheckpointer
from ddpilot.training.resume.position import RunPosition
from ddpilot.training.resume.tracked_state import TrackedState, has_state
from ddpilot.training.step.precision import Kind, Precision
from ddpilot.training.step.update import UpdateState


@locating
class LoopBase:
    """Holds the components and counters of a `Loop`, whose docstring describes the arguments."""

    @naming_options
    def __init__(
        self,
        seed: int = 0,
        *,
        accumulate: int = 1,
        precision: Kind = "fp32",
        max_time_s: float | None = None,
        check_finite: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        save_every_s: float | None = None,
        save_every_updates: int | None = None,
        resume: bool = True,
        progress: bool | None = None,
        backend: str | None = None,
        timeout_s: float | None = None,
        group: GroupLike | None = None,
    ) -> None:
        check_numbers(seed=seed, accumulate=accumulate, max_time_s=max_time_s)
        self.group: GroupLike = init_group(backend, timeout_s) if group is None else group
        self.seed = seed
        self.findings: tuple[Finding, ...] = ()
        """Findings so far; each is reported once."""
        self.progress = Progress(progress, is_rank_zero=self.group.is_rank_zero)
        """The progress display of rank 0; `loop.progress.show(acc=0.9)` adds values to it."""
        self._num_epochs: int | None = None
        self._accumulate = accumulate
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
        self._open_pass: object | None = None
        self._saves_by: Literal["nothing", "unsaved epoch", "user"] = "user" if checkpoint_dir is None else "nothing"
        self._data_clock = WaitClock()
        self._tracked = TrackedState()
        if self._precision.scaler is not None:
            self._tracked.add(self._precision.scaler, "scaler", optional=True)
        self._position = RunPosition(seed, self.group.rank, self.group.world_size, accumulate)
        options = CheckpointOptions(
            checkpoint_dir=checkpoint_dir,
            keep=keep,
            best=best,
            save_every_s=save_every_s,
            save_every_updates=save_every_updates,
            resume=resume,
        )
        self._checkpointer = RunCheckpointer(
            self.group, self._tracked, self._position, self._flags, self._updates.check_pending, options
        )
        seed_all(seed)

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
        """Move models to the device and, with several ranks, wrap them in DDP; return all objects in order. Collective.

        `things`: models, optimizers, and objects to save with them: schedulers, an `AveragedModel`, anything with
        `state_dict` and `load_state_dict`; one object is returned alone, several as a tuple. Weights and buffers are
        broadcast from rank 0. A returned model has the methods of the original, which run as forward passes of DDP.
        `explain` reports the chosen options and their reasons.

        `comm`: all-reduce gradients in 16 bits. `shard="optimizer"`: each rank keeps the optimizer state of its share
        of the parameters only (ZeroRedundancyOptimizer); use the returned optimizer. `find_unused_parameters`: updates
        may leave parameters unused; None: the variable DDP_FIND_UNUSED_PARAMETERS, False if it is not set.
        `static_graph`: all updates of the training use the same parameters in the same way. `bucket_cap_mb`: bucket
        size in MiB; None: DDP's 25. `gradient_as_bucket_view`: no second copy of gradients. `forward_sync_buffers`:
        rank 0's buffers are broadcast in forward passes too, of which every rank then has to run equally many.
        `sync_batch_norm`: BatchNorm statistics over all ranks, on GPUs only. `more`: further arguments of
        DistributedDataParallel.

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
            shard=shard,
            sync_batch_norm=sync_batch_norm,
            more=more,
        )
        earlier = tuple(self._prepared.optimizers)
        for thing in things:
            returned.append(self._prepare_thing(thing, options))
            if isinstance(returned[-1], Optimizer):
                for old in self._prepared.replace_optimizers(earlier, returned[-1]):
                    self._tracked.replace(old, returned[-1])
            self._tracked.add(returned[-1])
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _prepare_thing(self, thing: Any, options: DDPOptions) -> Any:
        if isinstance(thing, AveragedModel):
            move(thing, self.device)
            return thing
        if isinstance(thing, nn.Module):
            model, choices = wrap(thing, self.group, options)
            prepared = self._prepared.add_model(model, choices)
            self._updates.add_model(prepared)
            self._buffers.add(prepared)
            return model
        if isinstance(thing, Optimizer):
            if options.shard is not None:
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

    def explain(self) -> Explanation:
        """Report the options chosen by `prepare`, with their reasons and costs, and proposals. Collective.

        The report uses what DDP has recorded on all ranks: after about ten updates it includes times, and proposals for
        `find_unused_parameters`, `static_graph` and the all-reduce. Proposals are not applied automatically: a branch
        may be taken later, or on one rank only. The result is the same on every rank; show it with
        `loop.print(loop.explain())`.
        """
        return explain(self._prepared, self.group, self._accumulate, self._tracked.name_of)

    def loader(self, dataset: Any, **options: Any) -> MapLoader | StreamLoader:
        """Return a loader of this rank's samples of `dataset`, map-style or iterable; not collective.

        `options`: `global_batch_size` (samples of all ranks) or `batch_size_per_rank`, `shuffle`, `drop_last`,
        `shares`, `weights`, `num_workers` and others; see the table in docs/data.md. Raises DataError for invalid and
        unknown options, and LoopError for a DataLoader.
        """
        if isinstance(dataset, DataLoader):
            raise LoopError(
                "making a loader",
                found="a DataLoader instead of a dataset",
                fix="Write loop.shard(loader), which divides it among the ranks.",
            )
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed}
        make: Any = make_stream_loader if isinstance(dataset, IterableDataset) else make_loader
        return make(dataset, **{**job, **options})  # type: ignore[no-any-return]

    def shard(self, loader: DataLoader[Any], **options: Any) -> MapLoader | StreamLoader:
        """Return this rank's loader for an existing DataLoader, with the batches of one process; not collective.

        Its `batch_size` counts the samples of all ranks, which is reported once; with `batch_size_per_rank=True`, those
        of each rank. `options`: also `shares`, `seed`, `divides_itself` and `seed_samples`; see docs/data.md.
        Raises DataError.
        """
        job = {"rank": self.rank, "world_size": self.world_size, "seed": self.seed, "say": self._print_once}
        return shard_loader(loader, **{**job, **options})
