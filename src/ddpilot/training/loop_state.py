# SPDX-License-Identifier: Apache-2.0
"""What a `Loop` is made of, and what it says of itself."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.findings.finding import Finding
from ddpilot.group.enter import init_group, seed_all
from ddpilot.group.protocol import GroupLike
from ddpilot.training.arguments import check_numbers, naming_options
from ddpilot.training.deciding import Decider
from ddpilot.training.drifting import BufferDrift
from ddpilot.training.explaining import Prepared
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.keeping.keeper import Keeper
from ddpilot.training.keeping.options import KeepOptions
from ddpilot.training.keeping.place import Place
from ddpilot.training.keeping.things import Things
from ddpilot.training.leaving import Leaving
from ddpilot.training.memory import find_sharing
from ddpilot.training.nonfinite import FiniteWatch
from ddpilot.training.parameters import TrainedWatch
from ddpilot.training.precision import Kind, Precision
from ddpilot.training.printing import SayOnce, rank_zero_first
from ddpilot.training.progress import Progress
from ddpilot.training.signals import StopSignals
from ddpilot.training.unprepared import PreparedWatch
from ddpilot.training.updating import Updates
from ddpilot.training.waiting import WaitClock


class LoopState:
    """The parts and the figures of a `Loop`, which says what the arguments are."""

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
        """What was found to be unwise, each said once."""
        self.progress = Progress(progress, is_rank_zero=self.group.is_rank_zero)
        """What rank 0 shows of the epoch; `loop.progress.show(acc=0.9)` adds to it."""
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
        self._known: tuple[nn.Module, ...] = ()  # what `accumulate` has looked at in this pass
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

    @property
    def rank(self) -> int:
        """This rank's number, 0 to `world_size` - 1."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's models and batches are."""
        return self.group.device

    @property
    def batch(self) -> CurrentBatch | None:
        """The batch that `batches` is at, with its counts and the numbers of this rank's samples; None outside."""
        return self._updates.batch

    @property
    def epoch(self) -> int:
        """The epoch that `epochs` is at, or will begin with; can be set.

        Outside of `epochs`, each further pass of `batches` over the same data is the next epoch.
        """
        return self._place.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._place.go_to(epoch)

    @property
    def next_batch(self) -> int:
        """The batch that the next `batches` begins with: 0, unless all ranks left in the middle of an epoch."""
        return self._place.next_batch

    @next_batch.setter
    def next_batch(self, batch: int) -> None:
        self._place.next_batch = batch

    @property
    def num_updates(self) -> int:
        """Updates made by `step`, skipped ones not counted; of the first optimizer where there are several."""
        return self._place.num_updates

    @property
    def is_update(self) -> bool:
        """Is this the last batch of an accumulation group, after which the weights change?"""
        return self._updates.is_update

    @property
    def should_stop(self) -> bool:
        """Have all ranks decided to stop? The same on every rank; not collective."""
        return bool(self._decider.reasons)

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Why: of "asked", "time", "SIGINT", "SIGTERM", "SIGUSR1"."""
        return self._decider.reasons

    @property
    def data_s(self) -> float:
        """Seconds that this rank has waited for its data in `batches` so far."""
        return self._waiting.total_s

    @property
    def save_s(self) -> float:
        """Seconds that this rank has waited for checkpoints so far; they are written while it trains on."""
        return self._keeper.held_up_s

    def start_at(self, epoch: int, *, next_batch: int = 0, num_updates: int = 0) -> None:
        """Begin there, with the state that everything has: from an earlier loop in this process, say. Not collective.

        A checkpoint is gone on from only where it has more than `num_updates` updates.
        """
        self._place.epoch, self._place.next_batch, self._place.num_updates = epoch, next_batch, num_updates
        self._keeper.first_update = num_updates

    def stop_by(self, signals: StopSignals) -> None:
        """Have `signals`, which may be entered already, ask for stops, and those that came before. Not collective."""
        self._signals = signals
        signals.tell_to(self._decider.ask)

    def release_directory(self) -> None:
        """Let other processes write in the directory of checkpoints, once what is being written is on the disk.

        The end of `epochs` does it too. A later save takes the directory again. Not collective.
        """
        self._keeper.release()

    def autocast(self) -> AbstractContextManager[object]:
        """Forward passes in the loop's precision, where that is not fp32. `accumulate` does it by itself."""
        return self._precision.autocast()

    def stop(self, *, everywhere: bool = False) -> None:
        """Ask all ranks to stop, from any of them: they leave after the same update, or before the next epoch.

        Which update that is depends on when the ranks exchange their flags: about every 0.1 s, after 32 updates at
        most. `everywhere`: every rank calls this at the same point, as where the number of updates decides; then all
        leave after this very update. Not collective.
        """
        if everywhere:
            self._decider.agree("asked")
        else:
            self._decider.ask("asked")

    def print(self, *values: object, **options: Any) -> None:
        """`print` on rank 0, above the progress bar; nothing on the others."""
        if self.group.is_rank_zero:
            with self.progress.aside():
                print(*values, **options)  # noqa: T201  (that is what it is for)

    def rank_zero_first(self) -> AbstractContextManager[None]:
        """`with loop.rank_zero_first():` runs its body on rank 0, then on the others at once. Collective.

        Where rank 0 raises, the others raise RemoteRankError. For what is downloaded or prepared once.
        """
        return rank_zero_first(self.group)
