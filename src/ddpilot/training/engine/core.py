# SPDX-License-Identifier: Apache-2.0
"""`LoopCore`: the part of `Loop` that does not run a model: position, stop, data, collectives, logs, checkpoints."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ddpilot.checkpoint.collective import load_jointly, load_shards_jointly
from ddpilot.data.loaders import MapLoader, make_loader, make_shard_loader, make_stream_loader, prepare_data_loader
from ddpilot.data.shards.files import is_dataset_of_shards
from ddpilot.data.shards.loader import ShardLoader
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.profiler.running import RunningProfile
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.coordination.collectives import gather_batch, gather_rows, rank_zero_first, reduce_value
from ddpilot.training.coordination.stop import StopSignals
from ddpilot.training.engine.parts import LoopParts
from ddpilot.training.logs.recorder import Reduction
from ddpilot.training.models.explain import Explanation, explain
from ddpilot.training.models.sharding import is_sharded
from ddpilot.training.models.strategy import read_weights, strategy_of
from ddpilot.training.notices import locating
from ddpilot.training.resume.tracked_state import Redistribute


@locating
class LoopCore:
    """The base of `Loop`: what does not run a model."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self.group = parts.group
        self.seed = parts.seed
        self.progress = parts.progress
        """The progress display of rank 0; `loop.progress.show(acc=0.9)` adds values to it."""
        self._updates = parts.updates
        self._precision = parts.precision
        self._checkpointer = parts.checkpointer
        self._tracked = parts.tracked
        self._print_once = functools.cache(self.print)

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
        """The current batch of `batches`, with its counts and the indices of this rank's samples; None outside of
        `batches`."""
        return self._updates.batch

    @property
    def epoch(self) -> int:
        """The current epoch of `epochs`, or the epoch at which it will begin. Can be set.

        Outside of `epochs`, each further pass of `batches` over the same data is the next epoch.
        """
        return self._parts.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._parts.position.go_to(epoch)

    @property
    def next_batch(self) -> int:
        """Index of the batch at which the next `batches` starts: 0, unless all ranks stopped within an epoch."""
        return self._parts.position.next_batch

    @next_batch.setter
    def next_batch(self, batch: int) -> None:
        self._parts.position.next_batch = batch

    @property
    def num_updates(self) -> int:
        """Number of updates made by `step`, without skipped ones.

        If several optimizers each step once after a batch, this is one update. A second step of the same optimizer
        begins the next update.
        """
        return self._parts.position.num_updates

    @property
    def is_update(self) -> bool:
        """True for the last batch of an accumulation group, after which the weights are updated."""
        return self._updates.is_update

    @property
    def should_stop(self) -> bool:
        """True if all ranks have decided to stop. The same on every rank; not collective."""
        return bool(self._parts.flags.reasons)

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Reasons for the stop: "asked", "time", "SIGINT", "SIGTERM" or "SIGUSR1". Empty if the ranks do not stop."""
        return self._parts.flags.reasons

    @property
    def data_s(self) -> float:
        """Total seconds that this rank has waited for data in `batches`."""
        return self._parts.data_clock.total_s

    @property
    def save_s(self) -> float:
        """Total seconds that this rank has waited for checkpoints, which are written in the background."""
        return self._checkpointer.held_up_s

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings so far, such as buffers that differ between ranks; each is reported once."""
        return self._parts.findings

    @findings.setter
    def findings(self, findings: tuple[Finding, ...]) -> None:
        self._parts.findings = findings

    def start_at(self, epoch: int, *, next_batch: int = 0, num_updates: int = 0) -> None:
        """Start at this position with the current state of all objects. Not collective.

        Use it to continue an earlier loop. A checkpoint is then resumed only if it has more than `num_updates` updates.
        """
        self._parts.position.epoch, self._parts.position.next_batch, self._parts.position.num_updates = (
            epoch,
            next_batch,
            num_updates,
        )
        self._checkpointer.first_update = num_updates

    def stop_by(self, signals: StopSignals) -> None:
        """Let `signals`, which may already be entered, request stops. Not collective.

        Signals that `signals` received before this call count too.
        """
        self._parts.signals = signals
        signals.report_to(self._parts.flags.request)

    def stop(self, *, everywhere: bool = False) -> None:
        """Request a stop of all ranks: they stop after the same update, or before the next epoch. Not collective.

        Any rank may call it. Ranks exchange their requests about every 0.1 s, so they stop up to 32 updates later.
        `everywhere`: True if every rank calls this at the same point, for example after a given number of updates; all
        ranks then stop after exactly this update.
        """
        if everywhere:
            self._parts.flags.agree("asked")
        else:
            self._parts.flags.request("asked")

    def exchange_stop(self) -> bool:
        """Exchange stop requests now, after the step of an update. True if all ranks stop after it. Collective.

        A `stop` that any rank requested before this call takes effect after exactly this update.
        """
        self._updates.exchange()
        return self.should_stop

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the loop's precision; it does nothing for fp32.

        `accumulate` enters it itself.
        """
        return self._precision.autocast()

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

    def loader(self, dataset: Any, **options: Any) -> MapLoader | StreamLoader | ShardLoader:
        """Return a loader of this rank's samples of `dataset`: map-style, iterable or of shards. Not collective.

        `options`: the fields of `LoaderOptions`, such as `global_batch_size` (samples of all ranks) or
        `batch_size_per_rank`, `shuffle` and `num_workers`. Raises DataError for invalid and unknown options, and
        LoopError for a DataLoader.
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
        """Return this rank's loader for an existing DataLoader, with the batches of one process. Not collective.

        The DataLoader's `batch_size` is taken as the number of samples of all ranks, which is reported once. With
        `batch_size_per_rank=True`, it is the number of samples of each rank.

        `options`: also `batch_split`, `seed`, `divides_itself` and `seed_samples`; see `LoaderOptions`. Raises
        DataError for invalid and unknown options.
        """
        job = {"rank": self.rank, "world_size": self.world_size, "say": self._print_once, **self._with_seed(options)}
        return prepare_data_loader(loader, **job)

    def _with_seed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "seed": self.seed} if options.get("seed") is None else dict(options)

    def explain(self) -> Explanation:
        """Report the options that `prepare` chose, with reasons and costs, and propose better ones. Collective.

        The report uses what DDP recorded on all ranks. After about ten updates it includes times, and proposals for
        `find_unused_parameters`, `static_graph` and the all-reduce. Proposals are not applied automatically: a branch
        may be taken later, or on one rank only. The result is the same on every rank; show it with
        `loop.print(loop.explain())`.
        """
        return explain(self._parts.prepared, self.group, self._parts.next_group_size(), self._tracked.name_of)

    def profile(self) -> RunningProfile:
        """Return a context manager that measures where the time of its updates goes. Collective on exit.

        After the `with` block every rank has the profile of all ranks. ``loop.print(profile)`` shows it on rank 0, and
        ``profile.to_html(path)`` writes a report with pictures. If a rank made fewer than 6 updates, the text and the
        report note this, and ``profile.profile`` raises RecordError.
        """
        return RunningProfile(self.group, self._parts.prepared.ddp_models)

    def reduce(
        self, value: Any, op: Literal["mean", "sum", "min", "max"] = "mean", *, count: float | None = None
    ) -> torch.Tensor:
        """Reduce `value`, a number or a tensor of the same shape on all ranks, over all ranks. Collective.

        "mean" weights each rank by `count`, by default its number of samples in the current batch. The mean of the
        ranks' local losses is then the mean over all samples. Outside of `batches` the default is 1, except for the
        loss tensor that was last passed to `backward`: it keeps the count of its batch.
        """
        self._parts.join()
        weight = self._updates.count_behind(value) if count is None else count
        return reduce_value(value, op, weight, self.group)

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks in rank order, on every rank, on the CPU. Collective.

        `data`: a tensor with any number of rows on each rank, a tuple or dict of such tensors, or a list.
        """
        self._parts.join()
        return gather_rows(data, self.group)

    def gather_batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, on every rank, and the index of this rank's first row. Collective.

        Use it for losses that compare the samples of a batch with each other. In the backward pass, which is collective
        as well, the gradients of all ranks' losses reach the rank of each row. `rows`: (n, ...) on the device, of any
        dtype, with any n on each rank, including 0. Returns (sum of n, ...) in rank order. Raises LoopError on all
        ranks if the shapes of a row or the dtypes differ.
        """
        self._parts.join()
        return gather_batch(rows, self.group)

    def log(
        self,
        values: Mapping[str, Any],
        *,
        reduce: Reduction = "mean",
        per_s: Mapping[str, float] | None = None,
    ) -> None:
        """Log `values` by name to the `loggers`, over all ranks. Call it on every rank.

        In `batches` it is not collective, and does not wait for the device. After `log_every` updates, the values
        become a row: the mean since the last row, over all samples of all ranks. Each row also has "epoch", "update",
        "samples_per_s", "data_wait" (share of the time that the slowest rank waited for data) and "memory_gib" (peak,
        on accelerators). Times of evaluations are not included.

        - `values`: this rank's mean of the batch, which is weighted by its number of samples, or (mean, number of items
          in the mean).
        - `reduce`: "sum", "min" or "max" over batches and ranks instead of "mean", or "last", the latest value of rank
          0, for example for a learning rate.
        - `per_s`: amounts in this batch on this rank. Their sum over all ranks is divided by the time: `{"tokens": n}`
          is logged as "tokens_per_s". `{"flops": n}` also adds "mfu", the share of the devices' peak, if the peak is
          known; see `peak_flops`.

        Outside of `batches` it is collective, and the values become a row at once. Values without a count have to be
        equal on all ranks, as those of `evaluate` are: a mean of ranks' means would be wrong, and LoopError is raised
        on all ranks.

        A run that resumes continues the logs from the checkpoint, without duplicate rows. An exception of a logger is
        raised on all ranks, with the next row at the latest. Raises LoopError for a value that is not a number.
        """
        if self._updates.batch is not None:
            self._parts.log.add(values, reduce, per_s or {}, has_samples=self._updates.batch.count > 0)
            return
        if per_s:
            found = "`per_s` outside of `batches`, where no time is measured"
            raise LoopError("logging values", found=found, fix="Log it for each batch.", rank=self.rank)
        self._parts.join()
        self._parts.log.log_outside(values, reduce)

    def take_logged(self) -> dict[str, float]:
        """Return what was passed to `log` since the last call, over all ranks, with rates. Collective.

        Use it in a loop without `loggers`. The values are the same on every rank.
        """
        self._parts.join()
        return self._parts.log.take()

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of this rank's device, for "mfu". Can be set.

        None: the dense 16-bit peak of the device, if ddpilot knows the device.
        """
        return self._parts.log.peak_flops

    @peak_flops.setter
    def peak_flops(self, peak: float | None) -> None:
        self._parts.log.peak_flops = peak

    def track(self, *, per_rank: bool = False, redistribute: Redistribute | None = None, **things: Any) -> None:
        """Save and restore `things` with the checkpoints, each under its keyword's name. Not collective.

        Accepts anything with `state_dict` and `load_state_dict` that is not passed to `prepare`, and prepared objects
        to name them: `loop.track(generator=gen)`. Only the state of rank 0 is saved.

        - `per_rank`: True if each rank saves and restores its own state, such as the carried state of an RNN or a
          replay buffer. Every rank tracks the same names. Resuming at a different number of ranks then raises
          MismatchedCheckpointError on all ranks, unless `redistribute` is given.
        - `redistribute(states, rank, world_size)`: returns the state of `rank` from the saved states of all ranks, in
          rank order.

        Raises LoopError for other objects, and for models and optimizers with `per_rank`.
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
        of the epoch. Elsewhere it is saved at once, and is on disk on return. Write errors are reported on stderr and
        do not stop the training. Raises LoopError without a `checkpoint_dir`.
        """
        self._checkpointer.request(metrics, in_batch=self._updates.batch is not None)

    def resume(self, *, other_data: bool = False) -> bool:
        """Resume from the latest intact checkpoint. True if there is one. Collective.

        `epochs` calls it automatically; call it to have the weights earlier. It restores everything that was prepared
        or tracked, and the position in the data. Rank 0 reports the position on stderr when training or an evaluation
        begins. `other_data`: True accepts a dataset of a different length at the start of an epoch.

        Raises CorruptCheckpointError if no checkpoint is intact. Raises MismatchedCheckpointError, on all ranks and
        without any change, if the checkpoint belongs to a different run.
        """
        is_resumed = self._checkpointer.resume(other_data=other_data)
        self._parts.averages.count_from(self.num_updates)
        return is_resumed

    def load(self, model: nn.Module, path: str | os.PathLike[str], *, name: str = "model") -> None:
        """Load weights from a file or a checkpoint directory into `model`, on its own device. Collective.

        `path`, `name`: as for `load_weights`. If loading fails on one rank, the errors of `load_weights` are raised on
        all ranks, and no model is changed.
        """
        self._checkpointer.wait()
        inner = getattr(model, "_orig_mod", model)
        if is_sharded(inner):
            load_shards_jointly(inner, path, name, self.group, strategy_of(inner).load_weights, read_weights)
        else:
            load_jointly(model, path, name, self.group)

    def release_directory(self) -> None:
        """Allow other processes to write to the checkpoint directory, once pending writes are on disk. Not collective.

        The end of `epochs` releases it too. A later save locks it again.
        """
        self._checkpointer.release()
