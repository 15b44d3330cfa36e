# SPDX-License-Identifier: Apache-2.0
"""`LogRecorder`: joins the values that all ranks log into rows, which rank 0 passes to the loggers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ddpilot.checkpoint.directory import write_stderr
from ddpilot.errors import LoopError, RemoteRankError
from ddpilot.group.device import runs_behind
from ddpilot.group.protocol import GroupLike
from ddpilot.training.async_scalars import PendingScalar, ScalarCopier
from ddpilot.training.logs.loggers import Logger, LogStart
from ddpilot.training.logs.throughput import Throughput, find_peak_flops

Reduction = Literal["mean", "sum", "min", "max", "last"]
_REDUCTIONS = ("mean", "sum", "min", "max", "last")
_OWN = ("epoch", "update", "samples_per_s", "data_wait", "memory_gib", "mfu")
"""Columns that the loop fills in itself."""
Number: TypeAlias = float | torch.Tensor


@dataclass
class _Entry:
    """What was logged under one name since the last row, on one rank or on all."""

    reduce: str
    total: Any
    """The reduced value: a number, or a scalar tensor on a device; of a "mean" the sum of values times weights."""
    weight: float

    def add(self, other: _Entry) -> None:
        """Add a later value, or that of the next rank."""
        if other.weight == 0 and self.reduce == "mean":
            return
        if self.reduce in ("min", "max") and isinstance(self.total, torch.Tensor):
            self.total = getattr(torch, f"{self.reduce}imum")(self.total, other.total)
        elif self.reduce in ("min", "max"):
            self.total = {"min": min, "max": max}[self.reduce](self.total, other.total)
        else:
            self.total = other.total if self.reduce == "last" else self.total + other.total
        self.weight += other.weight

    @property
    def value(self) -> float:
        """The value for the row; NaN for a mean over nothing."""
        if self.reduce != "mean":
            return float(self.total)
        return float(self.total) / self.weight if self.weight else float("nan")


@dataclass
class _Row:
    """A row whose values may still be copied from the device."""

    update: int
    epoch: int
    entries: dict[str, tuple[str, float | PendingScalar, float]]
    per_s: dict[str, float]
    seconds: float
    rates: dict[str, float]


class LogRecorder:
    """The values that a loop logs. `every`: number of updates between rows; the end of a pass has a row too.

    `count_behind`: returns the default weight of a value on this rank.
    """

    def __init__(
        self,
        group: GroupLike,
        loggers: Sequence[Logger],
        every: int,
        rates: Throughput,
        count_behind: Callable[[object], float],
        position: Callable[[], tuple[int, int]],
    ) -> None:
        if every < 1:
            fix = "Pass a number of updates, 1 or more."
            raise LoopError("making a Loop", found=f"`log_every` is {every!r}", fix=fix)
        self._group = group
        self._loggers = tuple(loggers)
        self._every = every
        self._rates = rates
        self._count_behind = count_behind
        self._position = position
        self.peak_flops: float | None = None
        """Peak of this rank's device in FLOP/s; None: found by its name."""
        self._entries: dict[str, _Entry] = {}
        self._per_s: dict[str, float] = {}
        self._sender = ScalarCopier()
        self._late: _Row | None = None
        self._row_update = 0
        self._num_rows: int | None = None
        """Number of rows of this run so far; None before it is known."""
        self._is_open = self._has_opened = self._is_over = False
        self._failure: Exception | None = None
        self._is_reported = self._is_resumed = False
        self._left = {"failed": False}
        """What the end of the process finds: True in `epochs`, which did not come to its end then."""
        self._on_rank_zero(self._check)
        if group.is_rank_zero and self._loggers:
            weakref.finalize(self, _close, self._loggers, self._left)

    def _check(self) -> None:
        for one in self._loggers:
            one.check()

    def add(
        self, values: Mapping[str, Any], reduce: str, per_s: Mapping[str, Any], *, has_samples: bool = True
    ) -> None:
        """Add values of this rank's current batch; `has_samples`: True if it has any. Not collective."""
        if reduce not in _REDUCTIONS:
            raise _error(f"`reduce` is {reduce!r}", f"Use {', '.join(map(repr, _REDUCTIONS))}.", self._group)
        is_left_out = reduce in ("sum", "min", "max") and not has_samples  # they may be NaN
        for name, value in () if is_left_out else values.items():
            entry = self._read(name, value, reduce)
            known = self._entries.get(name)
            if known is None:
                self._entries[name] = entry
            elif known.reduce != reduce:
                found = f"{name!r} with reduce={reduce!r} after reduce={known.reduce!r}"
                raise _error(found, "Log it with the same `reduce` everywhere.", self._group)
            else:
                known.add(entry)
        for name, amount in per_s.items():
            self._per_s[name] = self._per_s.get(name, 0.0) + float(amount)

    def _read(self, name: str, value: Any, reduce: str) -> _Entry:
        if name in _OWN:
            fix = "The loop writes this column itself: choose a different name."
            raise _error(f"a value called {name!r}", fix, self._group)
        count: float | None = None
        if isinstance(value, tuple) and len(value) == 2:
            value, count = value[0], float(value[1])
            if reduce != "mean":
                raise _error(f"{name!r} with a count and reduce={reduce!r}", "Only a mean has a count.", self._group)
        weight = 1.0 if reduce != "mean" else self._count_behind(value) if count is None else count
        number = _as_number(name, value, self._group)
        if reduce == "mean":
            number = number * weight if weight else 0.0  # a mean over nothing may be NaN
        return _Entry(reduce, number, weight)

    def end_update(self, *, ends: bool) -> None:
        """After an update: write a row if it is due. `ends`: True if the pass ends here. Collective then."""
        if self._late is not None:
            self._write_late()
        if not self._loggers:
            return
        epoch, update = self._position()
        if update == self._row_update or not (ends or update % self._every == 0):
            return
        self._row_update = update
        seconds = self._rates.seconds
        self._late = _Row(update, epoch, self._send(), self._per_s, seconds, self._rates.read(seconds))
        self._entries, self._per_s = {}, {}
        self._rates.begin()
        if ends or not runs_behind(self._group.device):
            self._write_late()  # on an accelerator with the next update, for which the device need not be waited for

    def begin_pass(self) -> None:
        """Open the loggers, if they are not, and measure the speed from here on. Collective."""
        self._is_over = False
        self.open()
        self._rates.begin()

    def log_outside(self, values: Mapping[str, Any], reduce: str) -> None:
        """Write values that belong to no batch as a row of their own. Collective.

        Raises LoopError on all ranks if a mean without a count differs between ranks.
        """
        self._write_late()
        kept, self._entries = self._entries, {}
        try:
            self.add(values, reduce, {})
            plain = [name for name, value in values.items() if reduce in ("mean", "last") and _lacks_count(value)]
            joined = self._join(self._send(), {}, {}, equal=plain)
        finally:
            self._entries = kept
        self.open()
        epoch, update = self._position()
        row = {"epoch": epoch, "update": update, **{name: one.value for name, one in joined[0].items()}}
        self._emit("epoch", row, update)
        self._raise_failure()
        if self._is_over:
            self.close()

    def take(self) -> dict[str, float]:
        """Return the values since the last call, over all ranks, with the rates; for a loop without loggers.

        Collective.
        """
        sent, per_s, self._entries, self._per_s = self._send(), self._per_s, {}, {}
        seconds = self._rates.seconds
        rates = self._rates.read(seconds)
        self._rates.begin()
        return self._combine(*self._join(sent, per_s, rates), seconds)

    def open(self) -> None:
        """Open the loggers at the loop's position, unless they are open. Collective then."""
        if self._is_open or not self._loggers:
            return
        update, known = self._position()[1], self._num_rows
        is_new = not self._has_opened and not (update if known is None else known)

        def is_kept(index: int, row: Mapping[str, Any]) -> bool:
            return int(row.get("update", 0)) <= update if known is None else index < known

        start = LogStart(update=update, is_new=is_new, is_kept=is_kept)
        self._num_rows, self._is_open, self._has_opened = known or 0, True, True
        self._on_rank_zero(lambda: [one.open(start) for one in self._loggers])

    def finish(self) -> None:
        """Close the loggers at the end of training. A later `log` opens them again for its row. Collective."""
        self._write_late()
        self._raise_failure()
        self._is_over = True
        self.close()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Context of `Loop.epochs`: close the loggers if it ends early. Not collective."""
        self._left["failed"] = True
        try:
            yield
            self._left["failed"] = False
        finally:
            self.close(failed=self._left["failed"])  # after an exception; `finish` has closed them otherwise

    def close(self, *, failed: bool = False) -> None:
        """Close the loggers. Not collective."""
        if self._is_open:
            self._is_open = False
            if self._failure is not None:
                write_stderr(f"the last rows of the logs were not written: {self._failure!r}")
            if self._group.is_rank_zero:
                _close(self._loggers, {"failed": failed})

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows, the values since the last row, and the loggers' states. Collective."""
        self._write_late()
        own = {name: (one.reduce, float(one.total), one.weight) for name, one in self._entries.items()}
        joined = self._join(own, {}, {})[0]
        return {
            "rows": self._num_rows or 0,
            "row_update": self._row_update,
            "values": [(name, one.reduce, float(one.total), one.weight) for name, one in joined.items()],
            "loggers": [one.state_dict() for one in self._loggers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; before the loggers are opened."""
        self._num_rows, self._row_update = state["rows"], state["row_update"]
        self._entries, self._is_resumed = {}, True
        if self._group.is_rank_zero:
            self._entries = {name: _Entry(reduce, total, weight) for name, reduce, total, weight in state["values"]}
        if len(state["loggers"]) == len(self._loggers):
            for one, saved in zip(self._loggers, state["loggers"], strict=True):
                if saved:
                    one.load_state_dict(saved)

    def _send(self) -> dict[str, tuple[str, float | PendingScalar, float]]:
        sent: dict[str, tuple[str, float | PendingScalar, float]] = {}
        for name, one in self._entries.items():
            is_behind = isinstance(one.total, torch.Tensor) and runs_behind(one.total.device)
            sent[name] = one.reduce, self._sender.send(one.total) if is_behind else float(one.total), one.weight
        return sent

    def _write_late(self) -> None:
        row, self._late = self._late, None
        if row is None:
            return
        joined = self._join(row.entries, row.per_s, row.rates)
        values = self._combine(*joined, row.seconds)
        self._emit("update", {"epoch": row.epoch, "update": row.update, **values}, row.update)

    def _join(
        self,
        entries: Mapping[str, tuple[str, float | PendingScalar, float]],
        per_s: Mapping[str, float],
        rates: Mapping[str, float],
        equal: Sequence[str] = (),
    ) -> tuple[dict[str, _Entry], dict[str, float], list[dict[str, float]]]:
        """Return the values of all ranks, in rank order; raises on all ranks what a logger raised. Collective."""
        own = {
            name: (reduce, total.read() if isinstance(total, PendingScalar) else total, weight)
            for name, (reduce, total, weight) in entries.items()
        }
        mine = (own, dict(per_s), dict(rates), self._failure is not None, list(equal))
        everyone = [mine] if self._group.world_size == 1 else self._group.all_gather_object(mine)
        if any(failed for *_, failed, _ in everyone):
            self._raise_failure()
        _check_equal(everyone, self._group)
        joined: dict[str, _Entry] = {}
        sums: dict[str, float] = {}
        for values, amounts, *_ in everyone:
            for name, (reduce, total, weight) in values.items():
                if name not in joined:
                    joined[name] = _Entry(reduce, total, weight)
                elif reduce != "last":
                    joined[name].add(_Entry(reduce, total, weight))
            for name, amount in amounts.items():
                sums[name] = sums.get(name, 0.0) + amount
        self._report_absent(everyone)
        return joined, sums, [each for _, _, each, *_ in everyone]

    def _combine(
        self, joined: dict[str, _Entry], per_s: dict[str, float], rates: list[dict[str, float]], seconds: float
    ) -> dict[str, float]:
        """Return the values of a row, and the rates: of data and memory those of the rank with the maximum."""
        row = {name: one.value for name, one in joined.items()}
        row |= {f"{name}_per_s": amount / max(seconds, 1e-9) for name, amount in per_s.items()}
        own = rates[0]
        row |= {name: own[name] if name == "samples_per_s" else max(each[name] for each in rates) for name in own}
        peak = find_peak_flops(self._group.device) if self.peak_flops is None else self.peak_flops
        if "flops" in per_s and peak:
            row["mfu"] = row["flops_per_s"] / (peak * self._group.world_size)
        return row

    def _emit(self, kind: str, row: dict[str, Any], update: int) -> None:
        """Pass a row to the loggers on rank 0, where an exception is kept for `_join` and `_raise_failure`."""
        self._num_rows = (self._num_rows or 0) + 1
        if self._group.is_rank_zero and self._failure is None:
            try:
                for one in self._loggers:
                    one.write(kind, row, update)
            except Exception as error:  # noqa: BLE001  (raised on all ranks when they next meet)
                self._failure = error

    def _raise_failure(self) -> None:
        """Raise on all ranks what a logger raised on rank 0. Collective."""
        self._on_rank_zero(self._pop_failure)

    def _pop_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _on_rank_zero(self, call: Callable[[], object]) -> None:
        """Call it on rank 0; an exception there is raised on all ranks. Collective if there are loggers."""
        if not self._loggers:
            return
        error: Exception | None = None
        if self._group.is_rank_zero:
            try:
                call()
            except Exception as caught:  # noqa: BLE001  (raised below, after the other ranks know)
                error = caught
        text = "" if error is None else f"{type(error).__name__}: {error}"
        if self._group.world_size > 1:
            text = self._group.broadcast_object(text)
        if error is not None:
            raise error
        if text:
            fix = "See rank 0's traceback; this rank stops because of it."
            raise RemoteRankError("writing logs", found=f"rank 0 raised {text}", fix=fix, rank=self._group.rank)

    def _report_absent(self, everyone: Sequence[tuple[Any, ...]]) -> None:
        """Report once, on rank 0, values that only rank 0 logs, as programs for one process do under `if rank == 0`."""
        is_resumed, self._is_resumed = self._is_resumed, False  # rank 0 has the values of all ranks then
        if self._is_reported or is_resumed or not self._group.is_rank_zero or len(everyone) == 1:
            return
        others = {name for values, *_ in everyone[1:] for name in values}
        alone = [repr(name) for name in everyone[0][0] if name not in others]
        if alone:
            self._is_reported = True
            write_stderr(
                f"loop.log: only rank 0 has logged {', '.join(alone)}, so the row is not of all samples. Call loop.log "
                "on every rank, not under `if loop.rank == 0`: rank 0 writes the values of all ranks."
            )


def _close(loggers: Sequence[Logger], how: Mapping[str, bool]) -> None:
    for one in loggers:
        one.close(**how)


def _lacks_count(value: object) -> bool:
    """True for a value whose weight is unknown: neither (mean, count) nor the loss of a backward pass."""
    return not isinstance(value, tuple) and not (isinstance(value, torch.Tensor) and value.requires_grad)


def _as_number(name: str, value: Any, group: GroupLike) -> Number:
    """Return a number, or on a device that runs behind a scalar tensor in float64 (float32 on MPS)."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.detach().reshape(())
        return value.double() if runs_behind(value.device) else float(value)
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass  # an error that names the value follows
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r}"
    raise _error(f"{what} as {name!r}", "Log numbers or tensors with one element, or (mean, count).", group)


def _check_equal(everyone: Sequence[tuple[Any, ...]], group: GroupLike) -> None:
    """Raise LoopError, on all ranks, if a value that should be equal on all ranks is not."""
    for name in everyone[0][-1]:
        found = {rank: values[name][1] for rank, (values, *_) in enumerate(everyone) if name in values}
        low, high = min(found, key=lambda rank: found[rank]), max(found, key=lambda rank: found[rank])
        if found[high] - found[low] > 1e-6 * max(abs(found[high]), abs(found[low])):
            raise _error(
                f"{name!r} is {found[low]:.6g} on rank {low} and {found[high]:.6g} on rank {high}, between passes, "
                "where it is unknown what each is a mean over",
                "Pass (mean, count), e.g. (total / num, num); or reduce='sum', 'min' or 'max'.",
                group,
            )


def _error(found: str, fix: str, group: GroupLike | None) -> LoopError:
    return LoopError("logging values", found=found, fix=fix, rank=None if group is None else group.rank)
