# SPDX-License-Identifier: Apache-2.0
"""`Callback`, the base class of objects that `Trainer` calls during training, on rank 0 or on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from ddpilot.checkpoint.host_copy import can_hold
from ddpilot.errors import LoopError, did_you_mean
from ddpilot.trainer.run import Run


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
