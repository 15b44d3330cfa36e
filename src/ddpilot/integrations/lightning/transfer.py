# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run on rank 0, applied to the notebook's trainer, model and callbacks.

Consists of the weights as a state dict, plain attributes (numbers, strings, tensors and containers of them) of the
user's module and callbacks, states that the user's callbacks save in checkpoints, progress of the loops, and loggers.
Nothing else is sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from ddpilot.integrations.lightning.namespaces import namespace_of
from ddpilot.training.plain import plain_attributes

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one rank; ranks other than 0 only fill `predictions`."""

    results: Any = None
    """What Lightning's function returned: the metrics of `test`, None for `fit`."""
    predictions: Any = None
    """For `predict`, batches with the indices of their samples; otherwise None."""
    weights: dict[str, Any] | None = None
    """The module's state dict after `fit`; None after functions that do not change weights."""
    state: Any = None
    """The trainer's own `TrainerState`."""
    should_stop: bool = False
    metrics: tuple[dict[str, Any], ...] = ()
    progress: tuple[dict[str, Any], ...] = ()
    module: dict[str, Any] | None = None
    callbacks: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    loggers: tuple[dict[str, Any], ...] = ()
    """Attributes of the loggers: one that is created again for each launch would restart its file or run."""


def collect_outcome(
    trainer: Any, callbacks: Sequence[Any], results: Any, predictions: Any, *, with_weights: bool
) -> Outcome:
    """Return this rank's outcome. Collective: the state of a module's metrics is gathered."""
    model = trainer.lightning_module
    weights = model.state_dict()
    if not trainer.is_global_zero:
        return Outcome(predictions=predictions)
    return Outcome(
        results=results,
        predictions=predictions,
        weights=weights if with_weights else None,
        state=trainer.state,
        should_stop=trainer.should_stop,
        metrics=tuple(dict(getattr(trainer, name)) for name in _METRICS),
        progress=tuple(_read_progress(getattr(trainer, name)) for name in _LOOPS),
        module=_module_attributes(model),
        callbacks=tuple((plain_attributes(each), _saved_state(each)) for each in callbacks),
        loggers=tuple(_logger_attributes(each) for each in trainer.loggers),
    )


def apply_outcome(trainer: Any, outcome: Outcome) -> None:
    """Apply rank 0's outcome to the parent's trainer, its model, callbacks and loggers."""
    model = trainer.lightning_module
    if outcome.weights is not None:
        _load_weights(trainer, outcome.weights)
    vars(model).update(outcome.module or {})
    for callback, (attributes, state) in zip(trainer.callbacks, outcome.callbacks, strict=True):
        vars(callback).update(attributes)
        if state:
            callback.load_state_dict(state)
    for logger, attributes in zip(trainer.loggers, outcome.loggers, strict=True):
        vars(logger).update(attributes)
    for name, progress in zip(_LOOPS, outcome.progress, strict=True):
        _write_progress(getattr(trainer, name), progress)
    trainer.state = outcome.state
    trainer.should_stop = outcome.should_stop
    for name, metrics in zip(_METRICS, outcome.metrics, strict=True):
        known = getattr(trainer, name)
        known.clear()
        known.update(metrics)


def _load_weights(trainer: Any, weights: dict[str, Any]) -> None:
    # Not strict, as in Lightning: the module may have changed on the rank. But here it is reported.
    model = trainer.lightning_module
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        warn = namespace_of(trainer).of_trainer("utilities.rank_zero").rank_zero_warn
        warn(
            f"{type(model).__name__} has other parameters on the ranks than here: {unexpected} exist only there and "
            f"were left, {missing} exist only here and were not trained. Make all of them in `__init__`."
        )


def _saved_state(callback: Any) -> dict[str, Any]:
    # Lightning's callbacks keep state in plain attributes, and some treat `load_state_dict` as the start of a resumed
    # fit.
    is_lightnings = type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    return {} if is_lightnings else callback.state_dict()


def _module_attributes(model: Any) -> dict[str, Any]:
    # Attributes of Lightning and torch start with an underscore, except `training`.
    return {name: value for name, value in plain_attributes(model).items() if name[0] != "_" and name != "training"}


def _logger_attributes(logger: Any) -> dict[str, Any]:
    """Return the attributes as the logger's own pickling leaves them; if it cannot be pickled, the plain ones."""
    try:
        attributes: dict[str, Any] = vars(cloudpickle.loads(cloudpickle.dumps(logger)))
    except Exception:  # noqa: BLE001 - any error of a tracking service's client; the launch succeeded
        return plain_attributes(logger)
    return attributes


def _read_progress(loop: Any) -> dict[str, Any]:
    """Return the progress of a loop, and that of nested loops by name."""
    loops = namespace_of(loop).of_trainer("loops")
    read: dict[str, Any] = {}
    for name, value in vars(loop).items():
        if isinstance(value, loops.loop._Loop):
            read[name] = _read_progress(value)
        elif isinstance(value, loops.progress._BaseProgress) or name == "_batches_that_stepped":
            read[name] = value
    return read


def _write_progress(loop: Any, read: dict[str, Any]) -> None:
    for name, value in read.items():
        if isinstance(value, dict):
            _write_progress(getattr(loop, name), value)
        else:
            setattr(loop, name, value)
