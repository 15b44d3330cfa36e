# SPDX-License-Identifier: Apache-2.0
"""`LoopParts`: the objects that a loop is made of, which share its group, its models and its position in the data."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ddpilot.findings.finding import Finding
from ddpilot.group.protocol import GroupLike
from ddpilot.training.checks.buffers import BufferCheck
from ddpilot.training.checks.ddp_bypass import UnpreparedCheck
from ddpilot.training.checks.nonfinite import FiniteCheck
from ddpilot.training.coordination.out_of_memory import find_sharing
from ddpilot.training.coordination.stop import FlagExchange, LoneBreakCheck, StopSignals
from ddpilot.training.logs.loggers import Logger, check_loggers
from ddpilot.training.logs.recorder import LogRecorder
from ddpilot.training.logs.throughput import Throughput, TrainingClock
from ddpilot.training.models.registry import PreparedObjects
from ddpilot.training.notices import warn_findings
from ddpilot.training.options import CheckpointOptions
from ddpilot.training.progress import Progress, WaitClock
from ddpilot.training.resume.checkpointer import RunCheckpointer
from ddpilot.training.resume.data_position import RunPosition
from ddpilot.training.resume.tracked_state import TrackedState
from ddpilot.training.step.accumulation import Accumulate, AccumulationSchedule
from ddpilot.training.step.precision import Kind, Precision
from ddpilot.training.step.update import UpdateState
from ddpilot.training.step.weight_averages import LocalUpdates, WeightAverages


class LoopParts:
    """The parts of one `Loop`; for the arguments see `Loop`. Creating them is collective with a `checkpoint_dir`."""

    def __init__(
        self,
        group: GroupLike,
        *,
        seed: int,
        accumulate: Accumulate,
        precision: Kind,
        max_time_s: float | None,
        check_finite: bool,
        progress: bool | None,
    ) -> None:
        self.group = group
        self.seed = seed
        self.findings: tuple[Finding, ...] = ()
        self.progress = Progress(progress, is_rank_zero=group.is_rank_zero)
        self.accumulation = AccumulationSchedule.parse(accumulate, "making a Loop")
        self.precision = Precision(precision, group.device, group.world_size)
        self.sharing = find_sharing(group)
        self.prepared = PreparedObjects()
        self.flags = FlagExchange(group, max_time_s)
        self.signals = StopSignals(self.flags.request)
        finite = FiniteCheck(group.device) if check_finite and precision != "fp16" else None
        self.updates = UpdateState(self.prepared, group, self.flags, finite)
        self.unprepared = UnpreparedCheck(self.prepared)
        self.lone_break = LoneBreakCheck(group)
        self.buffers = BufferCheck(self.prepared, group)
        self.averages = WeightAverages()
        self.data_clock = WaitClock()
        self.clock = TrainingClock()
        self.tracked = TrackedState()
        if self.precision.scaler is not None:
            self.tracked.add(self.precision.scaler, "scaler", optional=True)
        self.position = RunPosition(seed, group.rank, group.world_size, self.accumulation.saved)
        self.count_updates = functools.partial(getattr, self.position, "num_updates")
        """Returns the number of updates so far."""
        self.local = LocalUpdates(group, self.count_updates)

    def add_checkpoints(self, options: CheckpointOptions) -> None:
        """Add the checkpointer. Collective with a `checkpoint_dir`; raises CheckpointError."""
        self.checkpointer = RunCheckpointer(
            self.group, self.tracked, self.position, self.flags, self.before_read, options
        )

    def add_logs(self, loggers: Logger | Sequence[Logger], log_every: int) -> None:
        """Add the recorder of what is logged, and the speed that the progress shows."""
        self.progress.speed = self._throughput()
        self.log = LogRecorder(
            self.group, check_loggers(loggers), log_every, self._throughput(), self.updates.count_behind, self._place
        )
        self.tracked.add(self.log, "logged", optional=True)

    def _throughput(self) -> Throughput:
        seen = functools.partial(getattr, self.position, "samples_seen")
        return Throughput(self.group.device, seen, functools.partial(getattr, self.data_clock, "total_s"), self.clock)

    def _place(self) -> tuple[int, int]:
        return self.position.epoch, self.position.num_updates

    def next_group_size(self) -> int:
        """Return the number of batches of the update that begins here."""
        return self.accumulation.size_at(self.position.epoch, self.position.num_updates)

    def join(self) -> None:
        """Before a collective call, wait for the other ranks to leave `batches` too, if this rank left it by `break`.

        Raises NonFiniteError on all ranks for an update before the `break`.
        """
        self.lone_break.wait()
        self.updates.complete_left()

    def before_read(self) -> None:
        """Raise NonFiniteError for earlier updates, and average weights that ranks update on their own. Collective."""
        self.updates.check_pending()
        self.local.average()

    def settle_averages(self) -> None:
        """Update the averages of the weights, before they are evaluated."""
        self.averages.settle(self.position.num_updates, self.position.epoch)

    def report_findings(self, found: tuple[Finding, ...]) -> None:
        """Warn of findings that are new, and add them to `findings`."""
        warn_findings(new := tuple(one for one in found if one not in self.findings), self.group)
        self.findings += new
