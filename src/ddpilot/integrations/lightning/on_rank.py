# SPDX-License-Identifier: Apache-2.0
"""The rank's half of a launch by Lightning: become the process that the strategy expects, run, collect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpilot.integrations.lightning.global_state import GlobalState
from ddpilot.integrations.lightning.namespaces import namespace_of
from ddpilot.integrations.lightning.outcome import Outcome, collect_outcome
from ddpilot.integrations.lightning.predictions import collect_predictions


class OnRank:
    """A function by the name that the user called; errors tell of that one."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def run_fabric(
    strategy: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], state: GlobalState
) -> Any:
    """What a rank does for `Fabric.launch`. Collective, as the function is; only rank 0 returns its value."""
    _become_rank(strategy, state)
    value = function(*args, **kwargs)
    return value if strategy.is_global_zero else None


def run_trainer(
    trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], state: GlobalState
) -> Outcome:
    """What a rank does for `Trainer.fit` and its sisters. Collective."""
    strategy = trainer.strategy
    _become_rank(strategy, state)
    trainer._accelerator_connector.cluster_environment = strategy.cluster_environment
    what = trainer.state.fn.value  # afterwards it may be "test": callbacks call that at the end of a fit
    callbacks = list(trainer.callbacks)  # the model may bring more of them, and change their order
    try:
        results = function(*args, **kwargs)
    except BaseException as error:
        strategy.on_exception(error)  # it knows what to add to torch's text about unused parameters
        raise
    predictions = collect_predictions(trainer, results) if what == "predict" else None
    return collect_outcome(trainer, callbacks, results, predictions, with_weights=what == "fit")


def _become_rank(strategy: Any, state: GlobalState) -> None:
    """The strategy was set up in the parent, as rank 0 of it; from here on this is a torchrun job."""
    state.restore()
    strategy.cluster_environment = namespace_of(strategy).of_fabric("plugins.environments").TorchElasticEnvironment()
    strategy._launcher = None  # a `trainer.test()` inside `fit` runs on the ranks that are there
    for name in ("set_world_ranks", "_set_world_ranks"):  # the Trainer's strategy has one, Fabric's the other
        if hasattr(strategy, name):
            getattr(strategy, name)()
