# SPDX-License-Identifier: Apache-2.0
"""The result of a fit, sent from rank 0 and loaded in place into the caller's model, optimizers and callbacks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

from ddpilot.data.nested import module_attributes
from ddpilot.errors import RankError
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.exception_report import report_exception
from ddpilot.launching.first_failure import RankEnd, build_error
from ddpilot.launching.rank_reports import Raised
from ddpilot.trainer.core import TrainerCore
from ddpilot.training.models.optimizers import full_state
from ddpilot.training.models.sharding import has_sharded_layer
from ddpilot.training.models.strategy import strategy_of

_COPIED = ("position", "batch_size", "findings", "explanation")
"""Attributes of a trainer that are replaced by those after the fit."""


@dataclass(frozen=True)
class FitResult:
    """What rank 0 sends after a fit."""

    state: dict[str, Any]
    """The state of the trainer, as `load_state` takes it; tensors are on the CPU."""
    late_error: tuple[Raised, bytes] | None
    """What a callback on rank 0 raised after the last update, and the pickled exception; b"" if it cannot be
    pickled."""


def collect_result(trainer: TrainerCore, group: GroupLike, late_error: Exception | None) -> FitResult | None:
    """Return the result on rank 0; None on other ranks. Collective if parameters or optimizer state are sharded."""
    whole = {
        name: strategy_of(model).weights(keeps=group.is_rank_zero)
        for name, model in (("weights", trainer.model), ("ema", trainer.ema))
        if model is not None and has_sharded_layer(model)
    }
    optimizers = {name: full_state(optimizer) for name, optimizer in trainer.optimizers.items()}
    if not group.is_rank_zero:
        return None
    return FitResult(_read_state(trainer, optimizers) | whole, None if late_error is None else _pack(late_error))


def unpack_late_error(late_error: tuple[Raised, bytes], num_ranks: int) -> RankError:
    """Return the error to raise in the notebook if a callback on rank 0 raised after the last update.

    The original exception is its cause, if it could be pickled. `num_ranks`: number of ranks of the fit.
    """
    raised, pickled = late_error
    try:
        cause = pickle.loads(pickled)
    except Exception:  # noqa: BLE001  (unpickling runs the user's code; the text is available in any case)
        cause = None
    failure = RankEnd(rank=0, raised=raised, error=cause, since_s=raised.time_s)
    error = build_error(
        failure, function_name="Trainer.fit", num_ranks=num_ranks, last_lines=(), victims=(), returned=()
    )
    error.fix = "Training had already ended: the trained weights and the history were loaded here"
    error.__cause__ = cause
    return error


def _pack(error: Exception) -> tuple[Raised, bytes]:
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  (pickling runs the user's code; the text is sent in any case)
        pickled = b""
    return report_exception(error), pickled


def _read_state(trainer: TrainerCore, optimizers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    model = trainer.model
    return {
        "weights": model.state_dict(),
        "frozen": {name for name, parameter in model.named_parameters() if not parameter.requires_grad},
        "attributes": {name: module_attributes(module) for name, module in model.named_modules()},
        "optimizers": optimizers,
        "schedulers": {name: scheduler.state_dict() for name, scheduler in trainer.schedulers.items()},
        "ema": None if trainer.ema is None else trainer.ema.state_dict(),
        "callbacks": [callback.state_dict() for callback in trainer.callbacks],
        "history": trainer.history.state_dict(),
        **{name: getattr(trainer, name) for name in _COPIED},
    }


def load_state(trainer: TrainerCore, state: dict[str, Any]) -> None:
    """Load the state after a fit into `trainer`'s model, optimizers and callbacks in place."""
    model = trainer.model
    model.load_state_dict(state["weights"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    modules = dict(model.named_modules())
    for name, attributes in state["attributes"].items():  # which a `Schedule` may have changed
        modules[name].__dict__.update(attributes)
    for name, saved in state["optimizers"].items():
        trainer.optimizers[name].load_state_dict(saved)
    for name, saved in state["schedulers"].items():
        trainer.schedulers[name].load_state_dict(saved)
    if trainer.ema is not None:
        trainer.ema.load_state_dict(state["ema"])
    for callback, saved in zip(trainer.callbacks, state["callbacks"], strict=True):
        callback.load_state_dict(saved)
    trainer.history.load_state_dict(state["history"])
    for name in _COPIED:
        setattr(trainer, name, state[name])


@contextmanager
def rollback_on_error(trainer: TrainerCore) -> Iterator[None]:
    """Restore the trainer's state if an exception is raised, as after a failed fit on ranks, which train copies."""
    before = copy.deepcopy(_read_state(trainer, {name: each.state_dict() for name, each in trainer.optimizers.items()}))
    try:
        yield
    except BaseException:
        load_state(trainer, before)
        for optimizer in trainer.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        raise
