# SPDX-License-Identifier: Apache-2.0
"""`Callback`, the base class of callbacks, and `CallbackRunner`, which calls them on rank 0 or on all ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar, cast

from ddpilot.checkpoint.host_copy import can_hold
from ddpilot.errors import LoopError
from ddpilot.group.decorators import on_ranks
from ddpilot.trainer.run import Run
from ddpilot.training.loop import Loop
from ddpilot.training.models.sharding import has_sharded_layer

Method = TypeVar("Method", bound=Callable[..., Any])


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
    """Ranks on which the methods are called, except those that `called_on` decorates."""
    _is_joint_if_sharded: ClassVar[bool] = False
    """True if the other ranks call the methods too where parameters are sharded, to gather what rank 0 reads."""

    @staticmethod
    def called_on(ranks: Literal["zero", "all"]) -> Callable[[Method], Method]:
        """Decorate a method to be called on `ranks`, whatever `ranks` of the class is. Raises LoopError for other
        values."""
        if str(ranks) not in ("zero", "all"):
            raise LoopError("decorating a callback's method", found=f"ranks {ranks!r}", fix="Use 'zero' or 'all'.")

        def decorate(method: Method) -> Method:
            vars(method)["called_on"] = ranks
            return method

        return decorate

    def on_fit_start(self, run: Run) -> None:
        """Called before the first epoch, after a checkpoint was loaded, if any."""

    def on_epoch_start(self, run: Run) -> None:
        """Called before the first batch of `run.epoch`, also if the epoch resumes in the middle."""

    def on_batch_start(self, run: Run) -> None:
        """Called before each batch; `run.batch` is this rank's part of it. Assign it to train on a different batch.

        Change its values on all ranks alike, so with `ranks` "all". The number of samples has to stay the same.
        """

    def on_step_start(self, run: Run) -> None:
        """Called before the step of each optimizer, with the gradients of all samples; `run.stepping` is its name.

        Gradients are complete, unscaled and clipped. Change them on all ranks alike. Not called if fp16 skips the
        update. With a closure they are the gradients of its first evaluation, and changes to them are not used.
        """

    def on_batch_end(self, run: Run) -> None:
        """Called after each batch, and its update if it ends an accumulation group; `run.loss` is its loss."""

    def on_update_end(self, run: Run) -> None:
        """Called after the weights changed. `run.loss` is this rank's loss; reading its value waits for the device."""

    def on_interval_end(self, run: Run) -> None:
        """Called after each interval and its validation, if `validate_every` counts updates. `run.metrics` is its row.

        This is within an epoch; `Run.stop` takes effect after this update.
        """

    def on_evaluate_end(self, run: Run) -> None:
        """Called after the validation; `run.metrics` has its results."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after an epoch and its validation, or after a stop within the epoch. `run.metrics` is its row."""

    def on_fit_end(self, run: Run) -> None:
        """Called after the last epoch or after all ranks stopped, if no exception was raised."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when `fit` ends with `error` on this rank, to release resources. Not called on all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, and to copy from rank 0 to the notebook's callback after `fit`.

        By default it has every attribute whose name does not start with an underscore and whose value a checkpoint can
        hold: numbers, strings, tensors, and lists, tuples, sets and dicts of them.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and can_hold(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Called before `on_fit_start`, and in the notebook after `fit`."""
        vars(self).update(state)


class CallbackRunner:
    """Calls the callbacks of one `fit` on this rank."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        is_rank_zero = run.loop.group.is_rank_zero
        joint = [one for one in callbacks if one._is_joint_if_sharded and has_sharded_layer(run.model)]
        events = [name for name in vars(Callback) if name.startswith("on_")]
        everywhere = {
            name: [(one, "joint" if one in joint else ranks_of(one, name)) for one in callbacks if _has(one, name)]
            for name in events
        }
        self._calls = {
            name: [(one, ranks) for one, ranks in calls if is_rank_zero or ranks != "zero"]
            for name, calls in everywhere.items()
        }
        """The callbacks that have a method for each event on this rank, and the ranks that call it. "joint": all of
        them, for rank 0, whose failures count as those of "zero" do."""
        self._has_rank_zero_callbacks = any(ranks != "all" for calls in everywhere.values() for _, ranks in calls)
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

    def call_in_batch(self, event: str) -> None:
        """Call `event` of each callback; not collective. After a failure on rank 0, all ranks stop, see `Run.stop`."""
        if not self._calls[event]:
            return
        self._call_each(event)
        if self._failure is not None:
            self._run.stop()

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Call `on_step_start` before each step that an optimizer of the run makes within the block."""
        handles = []
        for name, optimizer in self._run.optimizers.items() if self._calls["on_step_start"] else ():
            handles.append(optimizer.register_step_pre_hook(functools.partial(self._begin_step, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_step(self, name: str, *_: object) -> None:
        self._run.stepping = name
        try:
            self.call_in_batch("on_step_start")
        finally:
            self._run.stepping = ""

    def raise_failure(self) -> None:
        """Raise on all ranks what a callback raised on rank 0. Collective if a callback runs for rank 0."""
        if not self._has_rank_zero_callbacks:
            return
        try:
            on_ranks(0)(self._pop_failure)()
            self._pop_failure()  # of a joint call, on this rank alone
        except Exception as error:
            self._failure = None
            if not self.is_over:
                raise
            self.late_error = self.late_error or error

    def call_exception(self, error: BaseException) -> None:
        """Call `on_exception`, on this rank only; an exception in it becomes a warning in addition to `error`."""
        for callback, ranks in self._calls["on_exception"]:
            try:
                with self._restricted(callback, ranks) as run:
                    callback.on_exception(run, error)
            except Exception as second:  # noqa: BLE001  (the first error is the one to be raised)
                warnings.warn(f"{type(callback).__name__}.on_exception raised {second!r}", stacklevel=2)

    def _call_each(self, event: str) -> None:
        for callback, ranks in self._calls[event]:
            if ranks == "all":
                self._call_one(callback, event, ranks)
            elif ranks == "joint" or self._failure is None:
                try:
                    self._call_one(callback, event, ranks)
                except Exception as error:  # noqa: BLE001  (the other ranks continue: so does this one, until they stop)
                    self._failure = self._failure or error

    def _call_one(self, callback: Callback, event: str, ranks: str) -> None:
        try:
            with self._restricted(callback, ranks) as run:
                getattr(callback, event)(run)
        except OSError as error:
            if error.errno is None:
                raise
            where = f"{type(callback).__name__}.{event} on rank {self._run.loop.rank}"
            text = f"{error.strerror} (in {where}; free some space or use a different path, and fit again)"
            raise OSError(error.errno, text, error.filename) from error

    @contextmanager
    def _restricted(self, callback: Callback, ranks: str) -> Iterator[Run]:
        """Yield the run, with a `loop` that rejects collectives if other ranks do not call the callback."""
        loop = self._run.loop
        if ranks == "zero":
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


def ranks_of(callback: Callback, event: str) -> str:
    """Return the ranks on which `callback`'s method for `event` is called: "zero" or "all"."""
    return str(getattr(getattr(callback, event), "called_on", callback.ranks))


def _has(callback: Callback, event: str) -> bool:
    """True if `callback` overrides the method for `event`."""
    return getattr(getattr(callback, event), "__func__", None) is not vars(Callback)[event]


_LOOP_COLLECTIVES = {
    *("prepare", "explain", "epochs", "batches", "save", "resume", "load", "backward", "step", "reduce", "gather"),
    *("gather_batch", "evaluate", "predict", "rank_zero_first", "exchange_stop", "update_batch_norm", "log"),
    "take_logged",
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
