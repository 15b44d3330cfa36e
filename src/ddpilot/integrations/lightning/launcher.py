# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a launch by Lightning: send the trainer to the ranks, and apply their outcome."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted, ShipError
from ddpilot.integrations.lightning.global_state import GlobalState
from ddpilot.integrations.lightning.namespaces import namespace_of
from ddpilot.integrations.lightning.on_rank import OnRank, run_fabric, run_trainer
from ddpilot.integrations.lightning.predictions import join_predictions
from ddpilot.integrations.lightning.transfer import apply_outcome
from ddpilot.launcher import Launcher
from ddpilot.launching.shipping.unpicklable import ship

HEAVY = "ddpilot.integrations.lightning.preload"


class RanksStopped(BaseException):
    """The stop button or Ctrl-C ended the ranks of a Trainer or Fabric; none is left, and nothing was returned.

    It is not a KeyboardInterrupt: Lightning handles that by ignoring every later Ctrl-C and exiting the process.
    """

    def _render_traceback_(self) -> list[str]:
        """Render one line in IPython, as the parent's stack does not help."""
        return [f"RanksStopped: {self}"]


class RankServerLauncher:
    """Launcher of a Lightning strategy. All its processes have ended when `launch` returns."""

    is_interactive_compatible = True

    def __init__(self, strategy: Any, options: Launcher) -> None:
        self._strategy = strategy
        self._options = options

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on one rank for each device of the strategy, and return rank 0's result.

        With a `trainer`, its progress, metrics, callbacks and loggers, and after `fit` the weights of its model, are
        set to those of rank 0, and predictions of all ranks are returned in the order of the dataset. Raises
        RanksStopped after an interrupt.
        """
        try:
            if trainer is None:
                return self._launch_fabric(function, args, kwargs)
            return self._launch_trainer(function, args, kwargs, trainer)
        except LaunchInterrupted as interrupt:
            raise RanksStopped(str(interrupt)) from None

    def _launch_fabric(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = getattr(function, "args", (function,))[0]
        if inner is getattr(namespace_of(self._strategy).of_fabric("fabric"), "_do_nothing", None):
            name = type(self._strategy).__name__
            raise TypeError(
                f"{name} starts its ranks from here: give `Fabric.launch` the function that they are to run, as in "
                "`fabric.launch(train)`, where `train(fabric)` is your code"
            )
        rank_function = OnRank(run_fabric, f"Fabric.launch({getattr(inner, '__name__', type(inner).__name__)})")
        return self._run(rank_function, self._strategy, function, args, kwargs)[0]

    def _launch_trainer(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: Any
    ) -> Any:
        name = getattr(function, "__name__", "run").removeprefix("_").removesuffix("_impl")
        try:
            outcomes = list(self._run(OnRank(run_trainer, f"Trainer.{name}"), trainer, function, args, kwargs))
        except ShipError as error:
            _name_parts(trainer, args, kwargs, error)
            raise
        apply_outcome(trainer, outcomes[0])
        predictions = join_predictions([outcome.predictions for outcome in outcomes])
        if predictions is None and outcomes[0].results and name == "predict" and len(outcomes) > 1:
            warn = namespace_of(trainer).of_trainer("utilities.rank_zero").rank_zero_warn
            warn("The samples of this data loader have no numbers, so only what rank 0 predicted was returned.")
        return outcomes[0].results if predictions is None else predictions

    def _run(self, rank_function: OnRank, owner: Any, function: Any, args: Any, kwargs: Any) -> Any:
        strategy = self._strategy
        if strategy.num_nodes > 1:
            raise LaunchError(
                f"starting the ranks of `{rank_function.__qualname__}`",
                found=f"`num_nodes={strategy.num_nodes}`, and a launch from here reaches this machine alone",
                fix="Start the script on each node with `ddpilot run` or torchrun; the strategy then starts nothing",
            )
        preload = (HEAVY, *self._options.preload)
        launcher = replace(self._options, nproc_per_node=strategy.num_processes, preload=preload)
        return launcher.run(rank_function, owner, function, args, kwargs, GlobalState.capture())

    def kill(self, signum: int) -> None:
        """Do nothing, for Lightning's signal handlers: `launch` forwards a stop itself, and no rank outlives it."""


def _name_parts(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: ShipError) -> None:
    """Raise a ShipError with a path from a part that the user made, as a trainer's own parts all refer to each other.

    Returns if each of these parts can be pickled.
    """
    parts = {
        "model": trainer.lightning_module,
        **{f"trainer.callbacks[{index}]": callback for index, callback in enumerate(trainer.callbacks)},
        **{f"trainer.loggers[{index}]": logger for index, logger in enumerate(trainer.loggers)},
        "args": args,
        "kwargs": kwargs,
    }
    for name, part in parts.items():
        parcel, _ = ship("ddpilot-part", {name: part}, part, did=error.did, known=None)
        os.close(parcel)
