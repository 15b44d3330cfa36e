# SPDX-License-Identifier: Apache-2.0
"""Call callbacks on their ranks, and end training on all ranks if one fails on rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from ddpilot.group.decorators import on_ranks
from ddpilot.trainer.callback import Callback
from ddpilot.trainer.guarded import GuardedLoop
from ddpilot.trainer.run import Run
from ddpilot.training.loop import Loop


class Watchers:
    """The callbacks of one `fit` on this rank."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._callbacks = callbacks
        self._run = run
        self._has_own_of_zero = any(callback.ranks == "zero" for callback in callbacks)
        self._failure: Exception | None = None
        self.is_over = False
        """True once the last update was made, when a failure no longer ends training."""
        self.late: Exception | None = None
        """The first failure since then."""
        self._guarded = {
            id(callback): GuardedLoop(run.loop, type(callback).__qualname__)
            for callback in callbacks
            if callback.ranks == "zero"
        }

    def tell(self, event: str) -> None:
        """Call method `event` of each callback. Collective. An exception raised on rank 0 is raised on all ranks.

        If `is_over`, the exception is kept in `late` instead, and the remaining events still occur.
        """
        self._call(event)
        self.settle()

    def tell_update(self) -> None:
        """Call `on_update_end`; not collective. After a failure on rank 0, all ranks stop, see `Run.stop`."""
        self._call("on_update_end")
        if self._failure is not None:
            self._run.stop()

    def settle(self) -> None:
        """Raise on all ranks what a callback raised on rank 0. Collective if a callback runs on rank 0 only."""
        if not self._has_own_of_zero:
            return
        try:
            on_ranks(0)(self._raise_failure)()
        except Exception as error:
            if not self.is_over:
                raise
            self.late = self.late or error

    def tell_exception(self, error: BaseException) -> None:
        """Call `on_exception`, on this rank only; an exception in it becomes a warning in addition to `error`."""
        for callback in self._here():
            try:
                with self._seen_by(callback) as run:
                    callback.on_exception(run, error)
            except Exception as second:  # noqa: BLE001  (the first error is the one to be raised)
                warnings.warn(f"{type(callback).__name__}.on_exception raised {second!r}", stacklevel=2)

    def _call(self, event: str) -> None:
        for callback in self._here():
            if callback.ranks == "all":
                self._tell_one(callback, event)
            elif self._failure is None:
                try:
                    self._tell_one(callback, event)
                except Exception as error:  # noqa: BLE001  (the other ranks go on: so does this one, to the next exchange)
                    self._failure = error

    def _tell_one(self, callback: Callback, event: str) -> None:
        try:
            with self._seen_by(callback) as run:
                getattr(callback, event)(run)
        except OSError as error:
            if error.errno is None:
                raise
            where = f"{type(callback).__name__}.{event} on rank {self._run.loop.rank}"
            said = f"{error.strerror} (in {where}; make room or give it another path, and fit again)"
            raise OSError(error.errno, said, error.filename) from error

    @contextmanager
    def _seen_by(self, callback: Callback) -> Iterator[Run]:
        """Yield the run for `callback`: without collectives in `run.loop` if other ranks do not call the callback."""
        loop = self._run.loop
        self._run.loop = cast(Loop, self._guarded.get(id(callback), loop))
        try:
            yield self._run
        finally:
            self._run.loop = loop

    def _here(self) -> list[Callback]:
        is_zero = self._run.loop.group.is_rank_zero
        return [callback for callback in self._callbacks if is_zero or callback.ranks == "all"]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
