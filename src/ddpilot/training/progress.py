# SPDX-License-Identifier: Apache-2.0
"""Progress of an epoch on rank 0: a bar in terminals and notebooks, lines in logs; and the time spent on data."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from tqdm import tqdm

from ddpilot.group.device import runs_behind
from ddpilot.launching.rank_environment import WATCHED_VARIABLE
from ddpilot.launching.rank_environment import is_watched as is_shown_here
from ddpilot.training.async_scalars import PendingScalar, ScalarCopier
from ddpilot.training.batch_groups import length_of
from ddpilot.training.logs.throughput import Throughput

LINE_INTERVAL_S = 30.0
_BAR_INTERVAL_S = 0.2
_BAR_DELAY_S = 0.5


class Bar(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread and multiprocessing lock, which a forked worker would inherit."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())


class Lines:
    """Replaces the bar in logs: a line on stderr at most every `LINE_INTERVAL_S` seconds, the first after that.

    `clock`: returns seconds since any fixed time.
    """

    def __init__(
        self,
        desc: str,
        total: int | None,
        initial: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        unit: Literal["batch", "update"] = "batch",
    ) -> None:
        self.n = initial
        self._unit = unit
        self._desc = desc
        self._total = total
        self._initial = initial
        self._clock = clock
        self._began_s = self._written_s = clock()
        self._postfix = ""

    def update(self) -> bool:
        """Count a batch or an update. True if a line was written."""
        self.n += 1
        now_s = self._clock()
        if now_s - self._written_s < LINE_INTERVAL_S:
            return False
        self._written_s = now_s
        rate = (self.n - self._initial) / (now_s - self._began_s)
        of_all = "" if self._total is None else f" of {self._total}"
        left = "" if self._total is None else f", {tqdm.format_interval((self._total - self.n) / rate)} left"
        units = "batches" if self._unit == "batch" else "updates"
        sys.stderr.write(f"{self._desc}: {self._unit} {self.n}{of_all}, {rate:.3g} {units}/s{left}{self._postfix}\n")
        sys.stderr.flush()
        return True

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:  # noqa: ARG002  (as tqdm has it)
        """Set the end of the next lines."""
        self._postfix = f", {text}" if text else ""

    def clear(self) -> None:
        """Do nothing: there is no bar to clear."""

    refresh = close = clear


class Progress:
    """Shows the progress of an epoch on rank 0: batch index, rate, time left and loss.

    The loss is of rank 0's part of a recent batch. `show` adds further values.
    """

    def __init__(self, is_shown: bool | None, *, is_rank_zero: bool) -> None:
        self._kind: type[Bar | Lines] | None = Bar if is_watched() else Lines
        if not is_rank_zero or is_shown is False:
            self._kind = None
        elif is_shown:
            self._kind = Bar
        self._current: Bar | Lines | None = None
        self._counts_updates = False
        self._loss: torch.Tensor | None = None
        self._shown_loss: float | None = None
        self._sender = ScalarCopier()
        self._pending: PendingScalar | None = None
        self._shown: dict[str, str] = {}
        self.speed: Throughput | None = None
        """Measures what is shown next to the loss: samples per second, waiting for data, memory."""

    @property
    def is_shown(self) -> bool:
        """True if this rank shows progress."""
        return self._kind is not None

    def show(self, **values: Any) -> None:
        """Show `values` next to the loss from the next redraw on: floats with four digits, anything else as text.

        None removes a value. Does nothing on ranks that show no progress; not collective.
        """
        if self._kind is None:
            return
        for name, value in values.items():
            self._shown.pop(name, None)
            if value is not None:
                self._shown[name] = f"{value:.4g}" if isinstance(value, float) else str(value)

    @contextmanager
    def epoch(
        self,
        epoch: int,
        num_epochs: int | None,
        first_batch: int,
        loader: Any,
        updates: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Show the progress of an epoch that starts at `first_batch`; the finished bar remains visible.

        `updates`: number of updates so far and in all, to show the progress of the training in updates instead.
        """
        if self._kind is None:
            yield
            return
        desc = f"epoch {epoch}" + ("" if num_epochs is None else f" ({epoch + 1}/{num_epochs})")
        self._counts_updates = updates is not None
        if self.speed is not None:
            self.speed.begin()
        self._current = self._make(desc, *((length_of(loader), first_batch) if updates is None else updates[::-1]))
        try:
            yield
            self._take_loss(waits=True)
            self._request_loss()
            self._take_loss(waits=True)
        finally:
            self._current.set_postfix_str(self._postfix(), refresh=False)
            self._current.close()
            self._current = None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of the current batch."""
        if self._current is not None:
            self._loss = loss.detach()

    def advance(self, *, is_update: bool = True) -> None:
        """Count a finished batch; `is_update`: True if it was the last one of its update."""
        if self._current is None or (self._counts_updates and not is_update):
            return
        is_redrawn = self._current.update()
        if is_redrawn:
            self._request_loss()
        if is_redrawn or (self._pending is not None and self._pending.is_there):
            self._take_loss()
            self._current.set_postfix_str(self._postfix(), refresh=False)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Print the output of the block above the bar."""
        if self._current is None:
            yield
            return
        self._current.clear()
        try:
            yield
        finally:
            self._current.refresh()

    def _request_loss(self) -> None:
        """Read the latest loss: at once on the CPU; from an accelerator, start an asynchronous copy."""
        if self._loss is None or self._pending is not None:
            return
        if runs_behind(self._loss.device):
            self._pending = self._sender.send(self._loss)
        else:
            self._shown_loss = self._loss.item()
        self._loss = None

    def _take_loss(self, *, waits: bool = False) -> None:
        if self._pending is not None and (waits or self._pending.is_there):
            self._shown_loss, self._pending = self._pending.read(), None

    def _make(self, desc: str, total: int | None, initial: int) -> Bar | Lines:
        unit: Literal["batch", "update"] = "update" if self._counts_updates else "batch"
        if self._kind is Lines:
            return Lines(desc, total, initial, unit=unit)
        return Bar(
            desc=desc,
            total=total,
            initial=initial,
            unit=" updates" if self._counts_updates else " batches",
            file=sys.stderr,
            mininterval=_BAR_INTERVAL_S,
            delay=_BAR_DELAY_S,
            dynamic_ncols=True,
        )

    def _postfix(self) -> str:
        loss = {} if self._shown_loss is None else {"loss": f"{self._shown_loss:.4g}"}
        parts = [f"{name} {value}" for name, value in {**loss, **self._shown}.items()]
        speed = "" if self.speed is None else self.speed.render()
        return ", ".join([*parts, speed] if speed else parts)


def is_watched() -> bool:
    """True if the output is shown to a user: in a terminal, a notebook, or on a rank launched from one."""
    return WATCHED_VARIABLE in os.environ or is_shown_here()


T = TypeVar("T")


class WaitClock:
    """Adds up the time that iterators take to return their next item."""

    def __init__(self) -> None:
        self.total_s = 0.0
        """Total seconds so far."""

    def over(self, items: Generator[T, None, None]) -> Iterator[T]:
        """Yield from `items` and measure the time of each; closing this closes them."""
        clock = time.perf_counter
        try:
            while True:
                begin_s = clock()
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.total_s += clock() - begin_s
                yield item
        finally:
            items.close()
