# SPDX-License-Identifier: Apache-2.0
"""Results, weights and predictions that a launch by Lightning sends back from its ranks.

Sent are the weights as a state dict, plain attributes (numbers, strings, tensors and containers of them) of the
user's module and callbacks, states that the user's callbacks save in checkpoints, progress of the loops, and loggers.
Nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from ddpilot.data.nested import check_rows, join_named_rows, module_attributes, plain_attributes, take_rows
from ddpilot.errors import LoopError
from ddpilot.integrations.lightning.namespaces import namespace_of

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_JOINING = "joining predictions"
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


@dataclass(frozen=True, kw_only=True)
class RankResult:
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


def collect_result(
    trainer: Any, callbacks: Sequence[Any], results: Any, predictions: Any, *, with_weights: bool
) -> RankResult:
    """Return this rank's result. Collective: the state of a module's metrics is gathered."""
    model = trainer.lightning_module
    weights = model.state_dict()
    if not trainer.is_global_zero:
        return RankResult(predictions=predictions)
    return RankResult(
        results=results,
        predictions=predictions,
        weights=weights if with_weights else None,
        state=trainer.state,
        should_stop=trainer.should_stop,
        metrics=tuple(dict(getattr(trainer, name)) for name in _METRICS),
        progress=tuple(_read_progress(getattr(trainer, name)) for name in _LOOPS),
        module=module_attributes(model),
        callbacks=tuple((plain_attributes(each), _saved_state(each)) for each in callbacks),
        loggers=tuple(_logger_attributes(each) for each in trainer.loggers),
    )


def apply_result(trainer: Any, result: RankResult) -> None:
    """Apply rank 0's result to the parent's trainer, its model, callbacks and loggers."""
    model = trainer.lightning_module
    if result.weights is not None:
        _load_weights(trainer, result.weights)
    vars(model).update(result.module or {})
    for callback, (attributes, state) in zip(trainer.callbacks, result.callbacks, strict=True):
        vars(callback).update(attributes)
        if state:
            callback.load_state_dict(state)
    for logger, attributes in zip(trainer.loggers, result.loggers, strict=True):
        vars(logger).update(attributes)
    for name, progress in zip(_LOOPS, result.progress, strict=True):
        _write_progress(getattr(trainer, name), progress)
    trainer.state = result.state
    trainer.should_stop = result.should_stop
    for name, metrics in zip(_METRICS, result.metrics, strict=True):
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
            f"{type(model).__name__} has different parameters on the ranks: {unexpected} exist only there and were "
            f"discarded, {missing} exist only here and were not trained. Create all parameters in `__init__`."
        )


def _saved_state(callback: Any) -> dict[str, Any]:
    # Lightning's callbacks keep state in plain attributes, and some treat `load_state_dict` as the start of a resumed
    # fit.
    is_lightnings = type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))
    return {} if is_lightnings else callback.state_dict()


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


class Batch(NamedTuple):
    """One batch predicted by a rank: the indices of its samples, and what `predict_step` returned."""

    samples: list[int]
    output: Any


Loaders = list[list[Batch]]
"""The batches of one rank, by data loader."""


def collect_predictions(trainer: Any, results: Any) -> Loaders | None:
    """Return this rank's part of the results of `trainer.predict`; None without results or sample indices."""
    if not results:
        return None
    loop = trainer.predict_loop
    found = []
    by_loader = [results] if loop.num_dataloaders == 1 else results
    for loader, outputs in zip(loop._combined_loader.flattened, by_loader, strict=True):
        places = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
        if not places:
            return None
        found.append([Batch(list(samples), output) for samples, output in zip(places, outputs, strict=False)])
    return found


def join_predictions(ranks: Sequence[Loaders | None]) -> Any:
    """Return what `trainer.predict` returns on one device, from the parts of all ranks; None if a part is missing."""
    parts = [part for part in ranks if part is not None]
    if len(parts) < len(ranks):
        return None
    joined = [join_batches([batch for part in parts for batch in part[loader]]) for loader in range(len(parts[0]))]
    return joined[0] if len(joined) == 1 else joined


def join_batches(batches: Sequence[Batch]) -> list[Any]:
    """Return the outputs in dataset order, each sample once, in batches of the largest size.

    An output has rows if each part of it has one entry per sample: a tensor in its first dimension, a list by its
    items. If an output has no rows, the batches are returned unchanged, sorted by their first sample. Raises LoopError
    if the rows of one batch differ in structure or shape.
    """
    in_order = sorted(batches, key=lambda batch: min(batch.samples, default=-1))
    if not all(_has_rows(batch.output, len(batch.samples)) for batch in in_order):
        return [batch.output for batch in in_order]
    rows = {
        sample: take_rows(batch.output, [index]) for batch in in_order for index, sample in enumerate(batch.samples)
    }
    size = max((len(batch.samples) for batch in in_order), default=1)
    samples = sorted(rows)
    return [_join([rows[each] for each in samples[start : start + size]]) for start in range(0, len(rows), size)]


def _has_rows(output: Any, num_samples: int) -> bool:
    try:
        check_rows(output, num_samples, _JOINING)
    except LoopError:
        return False
    return bool(output) if isinstance(output, Mapping | tuple) else True


def _join(rows: Sequence[Any]) -> Any:
    return join_named_rows(rows, [f"row {number} of a batch" for number in range(len(rows))], _JOINING)
