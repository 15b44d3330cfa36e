# SPDX-License-Identifier: Apache-2.0
"""The components and properties of a `Loop`: position, device, stop requests and output on rank 0."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.findings.finding import Finding
from ddpilot.group.init_group import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batches import CurrentBatch
from ddpilot.training.checkpoint_options import KeepOptions
from ddpilot.training.checks.buffers import BufferDrift
from ddpilot.training.checks.nonfinite import FiniteWatch
from ddpilot.training.checks.unprepared import PreparedWatch
from ddpilot.training.coordination.leaving import Leaving
from ddpilot.training.coordination.out_of_memory import find_sharing
from ddpilot.training.coordination.printing import SayOnce, rank_zero_first
from ddpilot.training.coordination.signals import StopSignals
from ddpilot.training.coordination.stop import Decider
from ddpilot.training.models.explaining import Prepared
from ddpilot.training.models.parameters import TrainedWatch
from ddpilot.training.options import check_numbers, naming_options
from ddpilot.training.progress import Progress
from ddpilot.training.resume.checkpointer import Keeper
from ddpilot.training.resume.position import Place
from ddpilot.training.resume.tracked_state import Things
from ddpilot.training.step.precision import Kind, Precision
from ddpilot.training.step.update import Updates
from ddpilot.training.waiting import WaitClock


class LoopState:
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
        self._decider = Decider(self.group, max_time_s)
        watch = FiniteWatch(self.group.device) if check_finite and precision != "fp16" else None
        self._updates = Updates(self.group, self._decider, watch)
        self._signals = StopSignals(self._decider.ask)
        self._optimizers: list[Optimizer] = []
        self._replaced: WeakSet[Optimizer] | None = None
        self._say_once = SayOnce(self.print)
        self._trained = TrainedWatch()
        self._unprepared = PreparedWatch(self.group.rank)
        self._known: tuple[nn.Module, ...] = ()  # the models that `accumulate` has checked in this pass
        self._leaving = Leaving(self.group)
        self._drift = BufferDrift(self.group)
        self._open_pass: object | None = None
        self._saves_by: Literal["nothing", "unsaved epoch", "user"] = "user" if checkpoint_dir is None else "nothing"
        self._waiting = WaitClock()
        self._things = Things()
        self._place = Place(seed, self.group.rank, self.group.world_size, accumulate)
        self._prepared = Prepared(self.group)
        self._keeper = self._make_keeper(
            KeepOptions.of(
                checkpoint_dir,
                keep=keep,
                best=best,
                save_every_s=save_every_s,
                save_every_updates=save_every_updates,
                resume=resume,
            )
        )
        seed_all(seed)

    def _make_keeper(self, options: KeepOptions | None) -> Keeper:
        if self._precision.scaler is not None:
            self._things.add(self._precision.scaler, "scaler", optional=True)
        check = self._updates.check_pending
        return Keeper(self.group, self._things, self._place, self._decider, check, options)

    def _meet(self) -> None:
        """Wait for the other ranks to leave `batches`, if this rank left it by `break`, before a collective call.

        Raises NonFiniteError on all ranks for an update before the `break`.
        """
        self._leaving.meet()
        self._updates.settle_left()

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
        return self._place.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._place.go_to(epoch)

    @property
    def next_batch(self) -> int:
        """Index of the batch from which the next `batches` starts: 0, unless all ranks stopped within an epoch."""
        return self._place.next_batch

    @next_batch.setter
    def next_batch(self, batch: int) -> None:
        self._place.next_batch = batch

    @property
    def num_updates(self) -> int:
        """Number of updates made by `step`, without skipped ones; one step of each of several optimizers is one update.

        The first step after a batch begins an update, and so does each further step of an optimizer of that update.
        """
        return self._place.num_updates

    @property
    def is_update(self) -> bool:
        """True for the last batch of an accumulation group, after which the weights are updated."""
        return self._updates.is_update

    @property
    def should_stop(self) -> bool:
        """True if all ranks have decided to stop. The same on every rank; not collective."""
        return bool(self._decider.reasons)

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Reasons for the stop, of "asked", "time", "SIGINT", "SIGTERM" and "SIGUSR1"; empty while there is none."""
        return self._decider.reasons

    @property
    def data_s(self) -> float:
        """Total seconds that this rank has waited for data in `batches`."""
        return self._waiting.total_s

    @property
    def save_s(self) -> float:
        """Total seconds that this rank has waited for checkpoints, which are written in the background."""
        return self._keeper.held_up_s

    def start_at(self, epoch: int, *, next_batch: int = 0, num_updates: int = 0) -> None:
        """Start at this position with the current state of all objects, e.g. from an earlier loop. Not collective.

        A checkpoint is then resumed only if it has more than `num_updates` updates.
        """
        self._place.epoch, self._place.next_batch, self._place.num_updates = epoch, next_batch, num_updates
        self._keeper.first_update = num_updates

    def stop_by(self, signals: StopSignals) -> None:
        """Let `signals`, which may already be entered, request stops; signals received before count too.

        Not collective.
        """
        self._signals = signals
        signals.tell_to(self._decider.ask)

    def release_directory(self) -> None:
        """Allow other processes to write to the checkpoint directory, once pending writes are on disk. Not collective.

        The end of `epochs` releases it too. A later save locks it again.
        """
        self._keeper.release()

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
            self._decider.agree("asked")
        else:
            self._decider.ask("asked")

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
