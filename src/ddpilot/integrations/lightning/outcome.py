# SPDX-License-Identifier: Apache-2.0
"""What comes back from rank 0, so that the notebook's trainer, model and callbacks go on from there.

Weights as a state dict; plain attributes (numbers, texts, tensors and containers of them) of the user's module and the
callbacks; what the user's callbacks save in checkpoints; what loops have counted; loggers. Everything else stays there.
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
    """What one rank returns; of ranks other than 0 only `predictions` is filled."""

    results: Any = None
    """What Lightning's function returned: the metrics of `test`, None of `fit`."""
    predictions: Any = None
    """Of `predict`: batches with the samples that they are of; None of everything else."""
    weights: dict[str, Any] | None = None
    """The module's state dict after `fit`; None after what leaves the weights alone."""
    state: Any = None
    """The trainer's own `TrainerState`."""
    should_stop: bool = False
    metrics: tuple[dict[str, Any], ...] = ()
    progress: tuple[dict[str, Any], ...] = ()
    module: dict[str, Any] | None = None
    callbacks: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    loggers: tuple[dict[str, Any], ...] = ()
    """Their attributes: a logger that was made anew for each launch would begin its file or run from the start."""


def collect_outcome(
    trainer: Any, callbacks: Sequence[Any], results: Any, predictions: Any, *, with_weights: bool
) -> Outcome:
    """What this rank has to return. Collective: the state of a module's metrics is gathered."""
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
    """Make the parent's trainer, its model, callbacks and loggers what rank 0's were."""
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
    # As Lightning's own: what is in the module may have changed on the rank. But that is said.
    model = trainer.lightning_module
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        warn = namespace_of(trainer).of_trainer("utilities.rank_zero").rank_zero_warn
        warn(
            f"{type(model).__name__} has other parameters on the ranks than here: {unexpected} exist only there and "
            f"were left, {missing} exist only here and were not trained. Make all of them in `__init__`."
        )


def _saved_state(callback: Any) -> dict[str, Any]:
    # Lightning's own keep theirs in plain attributes, and some take a `load_state_dict` as the start of a resumed fit.
    is_lightnings = type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    return {} if is_lightnings else callback.state_dict()


def _module_attributes(model: Any) -> dict[str, Any]:
    # Lightning's and torch's own begin with an underscore, all but one.
    return {name: value for name, value in plain_attributes(model).items() if name[0] != "_" and name != "training"}


def _logger_attributes(logger: Any) -> dict[str, Any]:
    """All of them, as the logger itself would have them pickled; of one that cannot be any more, the plain ones."""
    try:
        attributes: dict[str, Any] = vars(cloudpickle.loads(cloudpickle.dumps(logger)))
    except Exception:  # noqa: BLE001 - whatever a client of a tracking service raises; the launch went well
        return plain_attributes(logger)
    return attributes


def _read_progress(loop: Any) -> dict[str, Any]:
    """What a loop counted, and by name what the loops within it did."""
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
