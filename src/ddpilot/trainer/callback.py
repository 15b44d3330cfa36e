# SPDX-License-Identifier: Apache-2.0
"""`Callback`, the base class of callbacks, and `CallbackRunner`, which calls them on rank 0 or on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

from ddpilot.checkpoint.host_copy import can_hold
from ddpilot.errors import LoopError, did_you_mean
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


def check_callbacks(given: Sequence[object]) -> None:
    """Raise LoopError for an object that is not a Callback, an invalid `ranks`, or an unknown `on_...` method."""
    for one in given:
        if not isinstance(one, Callback):
            found = f"a {type(one).__name__} among `callbacks`"
            raise LoopError("making a Trainer", found=found, fix="Derive its class from ddpilot.Callback.")
        if str(one.ranks) not in ("zero", "all"):
            found = f"{type(one).__name__}.ranks is {one.ranks!r}"
            raise LoopError("making a Trainer", found=found, fix="Say 'zero' or 'all'.")
        for name in dir(type(one)):
            if name.startswith("on_") and not hasattr(Callback, name) and callable(getattr(one, name)):
                known = [each for each in vars(Callback) if each.startswith("on_")]
                fix = did_you_mean(name, known) or f"Those that are: {', '.join(known)}."
                found = f"{type(one).__name__}.{name}, which is never called"
                raise LoopError("making a Trainer", found=found, fix=fix)


class CallbackRunner:
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


_OF_LOOP = frozenset(
    {
        "prepare",
        "explain",
        "epochs",
        "batches",
        "save",
        "resume",
        "load",
        "backward",
        "step",
        "reduce",
        "gather",
        "gather_batch",
        "evaluate",
        "predict",
        "rank_zero_first",
    }
)
_OF_GROUP = frozenset({"barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object", "leave"})


class GuardedLoop:
    """Proxy of `loop` without its collectives, which raise a LoopError that names `callback`."""

    def __init__(self, loop: Any, callback: str) -> None:
        self.group = _Guard(loop.group, _OF_GROUP, "run.loop.group", callback)
        self._guard = _Guard(loop, _OF_LOOP, "run.loop", callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guard, name)


class _Guard:
    def __init__(self, inner: Any, refused: frozenset[str], path: str, callback: str) -> None:
        self._inner = inner
        self._refused = refused
        self._path = path
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        if name not in self._refused:
            return getattr(self._inner, name)
        raise LoopError(
            f"calling {self._path}.{name} in {self._callback}",
            found="`ranks` is 'zero': only rank 0 is there, and would wait for the others for ever",
            fix=f'Set `ranks = "all"` in {self._callback}, or do without the other ranks.',
            rank=0,
        )
