# SPDX-License-Identifier: Apache-2.0
"""Stops all ranks together: flags exchanged every few updates, signals, and a rank that left its loop alone."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ddpilot.errors import LoopError
from ddpilot.group.device import wire_device
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.group.store import wait_for_keys
from ddpilot.launching.interrupts import RankInterrupt
from ddpilot.training.batch_groups import CurrentBatch
from ddpilot.training.notices import Line, warn_dropped

REASONS = ("asked", "time", "SIGINT", "SIGTERM", "SIGUSR1")
"""Reasons for a joint stop, in the order of their flags in the all_reduce."""

INTERVAL_S = 0.1
"""Target interval between two exchanges, in seconds; updates that take longer each have an exchange."""
MAX_INTERVAL = 32
"""Maximum number of updates between two exchanges: updates may suddenly take longer than those before."""


@dataclass(slots=True)  # a frozen one would take four times as long to create
class Decision:
    """The result of one exchange; the same on all ranks."""

    count: float
    """Sum of the counts that the ranks sent."""
    num_bad: int
    """Number of ranks whose loss is not finite."""
    reasons: tuple[str, ...]
    """Those of `REASONS` that some rank sent; if any, all ranks stop after this update."""
    saves: bool = False
    """True if some rank requested a checkpoint."""
    more: tuple[float, ...] = ()
    """Sums of the further numbers that the ranks sent."""


class FlagExchange:
    """Collects this rank's flags and exchanges them with the other ranks.

    `max_time_s`: seconds after `start` at which training ends, None for no limit. A flag that is set after an exchange
    began is sent with the next one. All ranks exchange with the same updates: the interval follows from the duration of
    the updates, which is all-reduced with the flags. `clock`: returns seconds since any fixed time.
    """

    def __init__(
        self, group: GroupLike, max_time_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._clock = clock
        self._max_time_s = max_time_s
        self._deadline: float | None = None
        self._requested: set[str] = set()
        self._requests_save = self._decided_save = False
        self._own: Decision | None = None
        self.is_under_way = False
        """True while an exchange is in flight, from `begin` to `finish`."""
        self._handle: dist.Work | None = None
        self._flags: torch.Tensor | None = None
        self._interval = 1
        """Number of updates between two exchanges; a single rank, for which they cost nothing, keeps 1."""
        self._num_updates = 0
        self._since_s = clock()
        self.reasons: tuple[str, ...] = ()
        """Reasons for the joint stop; empty while there is none."""

    def start(self) -> None:
        """Start the time limit at the first call; later calls have no effect. Not collective."""
        if self._deadline is None and self._max_time_s is not None:
            self._deadline = self._clock() + self._max_time_s

    def request(self, reason: str) -> None:
        """Request a stop of all ranks, for one of `REASONS`. Not collective; safe in a signal handler."""
        self._requested.add(reason)

    def request_save(self) -> None:
        """Request a checkpoint of all ranks after an update. Not collective."""
        self._requests_save = True

    def take_save(self) -> bool:
        """True if a checkpoint was decided since the last call. The same on every rank; not collective."""
        decided, self._decided_save = self._decided_save, False
        return decided

    def agree(self, reason: str) -> None:
        """Record a reason that every rank records at the same point, so that no exchange is needed."""
        self._add((reason,))

    def next_update(self) -> bool:
        """Count an update. True if the ranks exchange their flags with it; the same on all ranks."""
        self._num_updates += 1
        return self._num_updates >= self._interval

    def begin(self, *, count: float = 0.0, is_bad: bool = False, more: Sequence[float] = ()) -> None:
        """Send this rank's flags; `finish` returns the result. Collective. At most one exchange may be in flight.

        `more`: further numbers to sum, the same number of them on every rank.
        """
        if self._deadline is not None and self._clock() > self._deadline:
            self._requested.add("time")
        reasons = tuple(reason for reason in REASONS if reason in self._requested) if self._requested else ()
        saves, self._requests_save = self._requests_save, False
        self.is_under_way = True
        if self._group.world_size == 1:
            self._own = Decision(count, int(is_bad), reasons, saves, tuple(more))
            return
        pace_s = (self._clock() - self._since_s) / max(self._num_updates, 1)
        flags = (float(reason in reasons) for reason in REASONS)
        sent = [count, float(is_bad), pace_s, float(saves), *flags, *more]
        self._flags = torch.tensor(sent, dtype=torch.float64, device=wire_device(self._group))
        if isinstance(self._group, Group):
            self._handle = dist.all_reduce(self._flags, group=self._group.process_group, async_op=True)
        else:
            self._group.all_reduce(self._flags)

    def finish(self) -> Decision:
        """Return the result of the exchange in flight. Collective if none is in flight: it then begins one."""
        if not self.is_under_way:
            self.begin()
        decision = self._own or self._receive()
        self._own, self.is_under_way = None, False
        self._num_updates = 0
        if decision.saves:
            self._decided_save = True
        if decision.reasons:
            self._add(decision.reasons)
        return decision

    def _receive(self) -> Decision:
        """Wait for the flags of several ranks."""
        assert self._flags is not None  # set by begin()
        if self._handle is not None:
            self._handle.wait()
        count, num_bad, pace_s, num_saves, *rest = self._flags.tolist()
        flags, more = rest[: len(REASONS)], tuple(rest[len(REASONS) :])
        self._flags = self._handle = None
        self._set_interval(pace_s / self._group.world_size)
        reasons = tuple(reason for reason, flag in zip(REASONS, flags, strict=True) if flag)
        return Decision(count, round(num_bad), reasons, bool(num_saves), more)

    def _add(self, reasons: tuple[str, ...]) -> None:
        self.reasons = tuple(reason for reason in REASONS if reason in {*self.reasons, *reasons})

    def _set_interval(self, pace_s: float) -> None:
        # All ranks compute it from the same sum. It grows slowly, since the first updates predict later ones poorly.
        self._since_s = self._clock()
        fitting = int(INTERVAL_S / pace_s) if pace_s > INTERVAL_S / MAX_INTERVAL else MAX_INTERVAL
        self._interval = max(1, min(fitting, 2 * self._interval))


_SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None
)


class StopSignals:
    """Context in which SIGINT, SIGTERM and SIGUSR1 only call `report` with their name; no collective runs in a handler.

    A launched rank also reports to its parent that it handled SIGINT and will exit on its own.

    A second SIGINT calls the previous handler, to stop at once. SIGTERM and SIGUSR1 are left unchanged if other code
    handles them. Does nothing outside the main thread. Reentrant.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self._report = report
        self._unreported: list[str] = []
        self._depth = 0
        self._was_interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        self._was_interrupted = False
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if callable(before) if number == signal.SIGINT else before == signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._previous.items():
            # A handler that was installed in the meantime is kept.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            self._previous[number](number, frame)
            return
        if number == signal.SIGINT:
            self._was_interrupted = True
            if isinstance(before := self._previous[number], RankInterrupt):
                before.take()  # the function handles it, and its return value is wanted
        name = signal.Signals(number).name
        if self._report is None:
            self._unreported.append(name)
        else:
            self._report(name)

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` for future signals, and now for those received while there was no callback."""
        self._report = report
        while self._unreported:
            report(self._unreported.pop(0))


_PATIENCE_S = 3.0
"""Seconds that a rank waits for the other ranks to leave too, before it prints a warning."""
_LIMIT_S = 30.0
"""Seconds before it raises: a different rank may be writing a file."""


class LoneBreakCheck:
    """Tracks loops over `batches` that were left by `break`, which every rank must do at the same batch.

    A rank that leaves alone would run its next collective while the other ranks wait for its gradients. Over gloo that
    ends a process without an exception; over NCCL it hangs. This rank therefore checks the store, which needs no
    cooperation of the other ranks, whether they left too.
    """

    _num_loops: ClassVar[WeakKeyDictionary[object, int]] = WeakKeyDictionary()

    def __init__(self, group: GroupLike) -> None:
        self._group = group
        self._num_passes = 0
        self._loop = 0
        if isinstance(group, Group):  # every rank makes the same loops, so their numbers agree
            self._loop = self._num_loops[group.process_group] = self._num_loops.get(group.process_group, 0) + 1
        self._left: tuple[CurrentBatch, Line] | None = None
        self._dropped_at: Line | None = None

    def begin_pass(self) -> None:
        """Begin a new pass, whose keys in the store differ from those of earlier passes. Every rank calls it."""
        self._num_passes += 1

    def note(self, batch: CurrentBatch | None, line: Line, *, drops: bool) -> None:
        """Record that this rank left at `batch`, at `line` of the user's program. Not collective.

        `drops`: True if it left within an accumulation group, whose gradients are lost.
        """
        if drops:
            self._dropped_at = line
        if batch is not None and isinstance(self._group, Group) and self._group.world_size > 1:
            batch.data = None
            self._left = batch, line

    def wait(self) -> None:
        """Wait for the other ranks to leave too, and report dropped gradients on rank 0. Called before a collective.

        Does nothing on a rank that did not leave. After `_PATIENCE_S` it prints to stderr which ranks did not leave;
        after `_LIMIT_S` it raises LoopError.
        """
        left, self._left = self._left, None
        if left is not None and isinstance(self._group, Group):
            self._wait(*left, self._group)
        # Not reported when the loop is left: an error or the exit of a different rank would look the same.
        if self._dropped_at is not None:
            warn_dropped(self._dropped_at, self._group)
            self._dropped_at = None

    def _wait(self, batch: CurrentBatch, line: Line, group: Group) -> None:
        key = f"ddpilot/left/{self._loop}/{self._num_passes}/{batch.epoch}/{batch.index}/"
        others = {rank: f"{key}{rank}" for rank in range(group.world_size) if rank != group.rank}
        try:
            store = _get_process_group_store(group.process_group)
            store.set(f"{key}{group.rank}", "")
            if wait_for_keys(store, list(others.values()), _PATIENCE_S):
                return
            error = self._make_error(batch, line, [rank for rank, name in others.items() if not store.check([name])])
            sys.stderr.write(f"ddpilot: waiting for {_LIMIT_S - _PATIENCE_S:.0f} s more: {error}\n")
            sys.stderr.flush()
            if wait_for_keys(store, list(others.values()), _LIMIT_S - _PATIENCE_S):
                return
        except RuntimeError:  # the rank that hosts the store has exited: the next collective raises for it
            return
        raise error

    def _make_error(self, batch: CurrentBatch, line: Line, missing: list[int]) -> LoopError:
        return LoopError(
            f"leaving batches() at batch {batch.index} of epoch {batch.epoch} ({line[0]}:{line[1]})",
            found=f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not leave there; this rank's "
            "next collective would be paired with a different one there",
            fix="If one rank decides, call loop.stop(), which stops all ranks after the same update. A `break` has to "
            "be executed by every rank, at the same batch.",
            rank=self._group.rank,
        )
