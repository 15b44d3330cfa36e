# SPDX-License-Identifier: Apache-2.0
"""The rank's side of a launch by Lightning: set up the strategy's environment, run the function, collect results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpilot.integrations.lightning.global_state import GlobalState
from ddpilot.integrations.lightning.namespaces import namespace_of
from ddpilot.integrations.lightning.predictions import collect_predictions
from ddpilot.integrations.lightning.transfer import Outcome, collect_outcome


class OnRank:
    """A function with the name of the method that the user called, which errors show."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def run_fabric(
    strategy: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], state: GlobalState
) -> Any:
    """Run a rank of `Fabric.launch`. As collective as `function`; only rank 0 returns its value."""
    _become_rank(strategy, state)
    value = function(*args, **kwargs)
    return value if strategy.is_global_zero else None


def run_trainer(
    trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], state: GlobalState
) -> Outcome:
    """Run a rank of `Trainer.fit`, `validate`, `test` or `predict`. Collective."""
    strategy = trainer.strategy
    _become_rank(strategy, state)
    trainer._accelerator_connector.cluster_environment = strategy.cluster_environment
    what = trainer.state.fn.value  # may be "test" afterwards, as callbacks call it at the end of a fit
    callbacks = list(trainer.callbacks)  # the model may add callbacks and change their order
    try:
        results = function(*args, **kwargs)
    except BaseException as error:
        strategy.on_exception(error)  # extends torch's message about unused parameters
        raise
    predictions = collect_predictions(trainer, results) if what == "predict" else None
    return collect_outcome(trainer, callbacks, results, predictions, with_weights=what == "fit")


def _become_rank(strategy: Any, state: GlobalState) -> None:
    """Reconfigure the strategy, set up in the parent as rank 0, as one in a torchrun job."""
    state.restore()
    strategy.cluster_environment = namespace_of(strategy).of_fabric("plugins.environments").TorchElasticEnvironment()
    strategy._launcher = None  # a `trainer.test()` inside `fit` runs on the existing ranks
    for name in ("set_world_ranks", "_set_world_ranks"):  # the Trainer's strategy has the first, Fabric's the second
        if hasattr(strategy, name):
            getattr(strategy, name)()
