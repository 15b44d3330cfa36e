# SPDX-License-Identifier: Apache-2.0
"""`Callback`: what looks on while a `Trainer` trains, on rank 0 or on all ranks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from ddpilot.errors import LoopError
from ddpilot.trainer.run import Run
from ddpilot.training.checkpoint.snapshot import can_hold


class Callback:
    """Base of callbacks: override what you need. Each method is called with the `Run`, on the ranks of `ranks`.

    `ranks`: "zero" (the default), for what writes or shows something. Its methods must make no collective call: the
    other ranks train on meanwhile. Those of `run.loop` and its `group` raise LoopError there. What a method raises ends
    `fit` with that error on all ranks, at once where it is between updates, and as soon as after `Run.stop` where it is
    `on_update_end`. "all": every rank calls it, and it may make collective calls; what it raises on one rank ends that
    rank there and then, as in a loop of one's own.

    Callbacks are called in the order in which `Trainer` was given them. They travel to the ranks with what they have;
    open files and threads belong into `on_fit_start`. A method `on_...` that is none of these is refused.
    """

    ranks: ClassVar[Literal["zero", "all"]] = "zero"
    """Where its methods run."""

    def on_fit_start(self, run: Run) -> None:
        """Before the first epoch; after a checkpoint was loaded, where there is one."""

    def on_epoch_start(self, run: Run) -> None:
        """Before the first batch of `run.epoch`; also where that goes on in the middle."""

    def on_update_end(self, run: Run) -> None:
        """After the weights changed. `run.loss` is this rank's; to read its value makes the host wait for a GPU."""

    def on_evaluate_end(self, run: Run) -> None:
        """After the validation data were gone through; `run.metrics` has what was found."""

    def on_epoch_end(self, run: Run) -> None:
        """After an epoch, its validation too, or after the part of it before a stop. `run.metrics` is its row."""

    def on_fit_end(self, run: Run) -> None:
        """After the last epoch or the joint stop, where nothing was raised."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """`fit` ends with `error` on this rank: close what is open. Not together with other ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept in checkpoints, and comes back into the notebook's callback after `fit`, from rank 0.

        By default every attribute whose name does not begin with an underscore and that is a number, a text, a tensor,
        or a list, tuple, set or dict of those: what a checkpoint can hold.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and can_hold(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned. Called before `on_fit_start`, and in the notebook after `fit`."""
        vars(self).update(state)


def check_callbacks(given: Sequence[object]) -> None:
    """Raise LoopError for what is no callback, says other ranks than there are, or has a method that nobody calls."""
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
                near = difflib.get_close_matches(name, known, 1)
                fix = f"Did you mean `{near[0]}`?" if near else f"Those that are: {', '.join(known)}."
                found = f"{type(one).__name__}.{name}, which is never called"
                raise LoopError("making a Trainer", found=found, fix=fix)
