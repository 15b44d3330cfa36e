# SPDX-License-Identifier: Apache-2.0
"""`Callback`, the base class of callbacks, and `CallbackRunner`, which calls them on rank 0 or on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

from ddpilot.checkpoint.host_copy import can_hold
from ddpilot.errors import LoopError
from ddpilot.group.decorators import on_ranks
from ddpilot.trainer.run import Run
from ddpilot.training.loop import Loop


class Callback:
    """Base class of callbacks: override the methods you need. Each is called with the `Run`, on the ranks of `ranks`.

    `ranks`: "zero" (default) for callbacks that write or show something. Their methods must not call collectives, as
    the other ranks continue to train; those of `run.loop` and its `group` raise LoopError. An exception in a method
    ends `fit` with this exception on all ranks: immediately between updates, and as soon as `Run.stop` would after
    `on_update_end`. "all": every rank calls the methods, and they may call collectives; an exception on one rank ends
    that rank immediately, as in a hand-written loop.

    Callbacks are called in the order in which they were passed to `Trainer`. They are pickled and sent to the ranks, so
    open files and start threads in `on_fit_start`. Unknown methods named `on_...` are rejected.
    """

    ranks: ClassVar[Literal["zero", "all"]] = "zero"
    """Ranks on which the methods are called."""

    def on_fit_start(self, run: Run) -> None:
        """Called before the first epoch, after a checkpoint was loaded, if any."""

    def on_epoch_start(self, run: Run) -> None:
        """Called before the first batch of `run.epoch`, also if the epoch resumes in the middle."""

    def on_update_end(self, run: Run) -> None:
        """Called after the weights changed. `run.loss` is this rank's loss; reading its value waits for the device."""

    def on_interval_end(self, run: Run) -> None:
        """Called after each interval if `validate_every` counts updates, and its validation; `run.metrics` is its row.

        Within an epoch; `Run.stop` takes effect after this update.
        """

    def on_evaluate_end(self, run: Run) -> None:
        """Called after the validation; `run.metrics` has its results."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after an epoch and its validation, or after a stop in its middle. `run.metrics` is its row."""

    def on_fit_end(self, run: Run) -> None:
        """Called after the last epoch or after all ranks stopped, if no exception was raised."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when `fit` ends with `error` on this rank, to release resources. Not called on all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, and to copy to the notebook's callback after `fit`, from rank 0.

        By default every attribute whose name does not start with an underscore and whose value a checkpoint can hold:
        numbers, strings, tensors, and lists, tuples, sets and dicts of them.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and can_hold(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Called before `on_fit_start`, and in the notebook after `fit`."""
        vars(self).update(state)


class CallbackRunner:
    """Calls the callbacks of one `fit` on this rank."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        is_rank_zero = run.loop.group.is_rank_zero
        self._callbacks = [one for one in callbacks if is_rank_zero or one.ranks == "all"]
        self._has_rank_zero_callbacks = any(one.ranks == "zero" for one in callbacks)
        self._run = run
        self._failure: Exception | None = None
        self.is_over = False
        """True once the last update was made, when a failure no longer ends training."""
        self.late_error: Exception | None = None
        """The first failure since then."""

    def call(self, event: str) -> None:
        """Call method `event` of each callback. Collective. An exception raised on rank 0 is raised on all ranks.

        If `is_over`, the exception is kept in `late_error` instead, and the remaining events still occur.
        """
        self._call_each(event)
        self.raise_failure()

    def call_update_end(self) -> None:
        """Call `on_update_end`; not collective. After a failure on rank 0, all ranks stop, see `Run.stop`."""
        self._call_each("on_update_end")
        if self._failure is not None:
            self._run.stop()

    def raise_failure(self) -> None:
        """Raise on all ranks what a callback raised on rank 0. Collective if a callback runs on rank 0 only."""
        if not self._has_rank_zero_callbacks:
            return
        try:
            on_ranks(0)(self._pop_failure)()
        except Exception as error:
            if not self.is_over:
                raise
            self.late_error = self.late_error or error

    def call_exception(self, error: BaseException) -> None:
        """Call `on_exception`, on this rank only; an exception in it becomes a warning in addition to `error`."""
        for callback in self._callbacks:
            try:
                with self._restricted(callback) as run:
                    callback.on_exception(run, error)
            except Exception as second:  # noqa: BLE001  (the first error is the one to be raised)
                warnings.warn(f"{type(callback).__name__}.on_exception raised {second!r}", stacklevel=2)

    def _call_each(self, event: str) -> None:
        for callback in self._callbacks:
            if callback.ranks == "all":
                self._call_one(callback, event)
            elif self._failure is None:
                try:
                    self._call_one(callback, event)
                except Exception as error:  # noqa: BLE001  (the other ranks continue: so does this one, until they stop)
                    self._failure = error

    def _call_one(self, callback: Callback, event: str) -> None:
        try:
            with self._restricted(callback) as run:
                getattr(callback, event)(run)
        except OSError as error:
            if error.errno is None:
                raise
            where = f"{type(callback).__name__}.{event} on rank {self._run.loop.rank}"
            text = f"{error.strerror} (in {where}; free some space or use a different path, and fit again)"
            raise OSError(error.errno, text, error.filename) from error

    @contextmanager
    def _restricted(self, callback: Callback) -> Iterator[Run]:
        """Yield the run, with a `loop` that rejects collectives if other ranks do not call the callback."""
        loop = self._run.loop
        if callback.ranks == "zero":
            name = type(callback).__qualname__
            group = _Restricted(loop.group, _GROUP_COLLECTIVES, "run.loop.group", name)
            self._run.loop = cast(Loop, _Restricted(loop, _LOOP_COLLECTIVES, "run.loop", name, group=group))
        try:
            yield self._run
        finally:
            self._run.loop = loop

    def _pop_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


_LOOP_COLLECTIVES = {
    *("prepare", "explain", "epochs", "batches", "save", "resume", "load", "backward", "step", "reduce", "gather"),
    *("gather_batch", "evaluate", "predict", "rank_zero_first", "exchange_stop"),
}
_GROUP_COLLECTIVES = {"barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object", "leave"}


class _Restricted:
    """Proxy of `inner` with the attributes `replaced`, which raises LoopError for the attributes `refused`."""

    def __init__(self, inner: Any, refused: set[str], path: str, callback: str, **replaced: Any) -> None:
        vars(self).update(replaced)
        self._inner = inner
        self._refused = refused
        self._path = path
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        if name not in self._refused:
            return getattr(self._inner, name)
        raise LoopError(
            f"calling {self._path}.{name} in {self._callback}",
            found="`ranks` is 'zero': only rank 0 calls it, and would wait for the other ranks forever",
            fix=f'Set `ranks = "all"` in {self._callback}, or do without collectives.',
            rank=0,
        )
