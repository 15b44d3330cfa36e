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
from torch import nn

from ddpilot.data.nested import plain_attributes
from ddpilot.errors import RankError
from ddpilot.findings.finding import Finding
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.exception_report import report_exception
from ddpilot.launching.first_failure import RankEnd, build_error
from ddpilot.launching.rank_reports import Raised
from ddpilot.trainer.core import Position, TrainerCore
from ddpilot.training.models.explain import Explanation
from ddpilot.training.models.optimizers import full_state


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The state of a trainer after a fit; tensors are on the CPU."""

    weights: dict[str, Any]
    frozen: frozenset[str]
    """Names of the parameters that do not require gradients."""
    attributes: dict[str, dict[str, Any]]
    """Public plain attributes of the model's modules, by module name, which a `Schedule` may have changed."""
    optimizers: dict[str, dict[str, Any]]
    schedulers: dict[str, dict[str, Any]]
    ema: dict[str, Any] | None
    callbacks: list[dict[str, Any]]
    history: dict[str, Any]
    position: Position
    batch_size: int
    findings: tuple[Finding, ...]
    explanation: Explanation | None
    late_error: tuple[Raised, bytes] | None = None
    """What a callback on rank 0 raised after the last update, and the pickled exception; b"" if it cannot be
    pickled."""


def collect_result(trainer: TrainerCore, group: GroupLike, late_error: Exception | None) -> FitResult | None:
    """Return the result on rank 0; None on other ranks. Collective if optimizer state is sharded."""
    optimizers = {name: full_state(optimizer) for name, optimizer in trainer.optimizers.items()}
    return _gather(trainer, optimizers, late_error) if group.is_rank_zero else None


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


def _gather(
    trainer: TrainerCore, optimizers: dict[str, dict[str, Any]], late_error: Exception | None = None
) -> FitResult:
    model = trainer.model
    return FitResult(
        weights=model.state_dict(),
        frozen=frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        attributes={name: _public(module) for name, module in model.named_modules()},
        optimizers=optimizers,
        schedulers={name: scheduler.state_dict() for name, scheduler in trainer.schedulers.items()},
        ema=None if trainer.ema is None else trainer.ema.state_dict(),
        callbacks=[callback.state_dict() for callback in trainer.callbacks],
        history=trainer.history.state_dict(),
        position=trainer.position,
        batch_size=trainer.batch_size,
        findings=trainer.findings,
        explanation=trainer.explanation,
        late_error=None if late_error is None else _pack(late_error),
    )


def load_result(trainer: TrainerCore, result: FitResult) -> None:
    """Load `result` into `trainer`'s model, optimizers and callbacks in place."""
    model = trainer.model
    model.load_state_dict(result.weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in result.frozen)
    modules = dict(model.named_modules())
    for name, attributes in result.attributes.items():
        modules[name].__dict__.update(attributes)
    for name, state in result.optimizers.items():
        trainer.optimizers[name].load_state_dict(state)
    for name, state in result.schedulers.items():
        trainer.schedulers[name].load_state_dict(state)
    if trainer.ema is not None and result.ema is not None:
        trainer.ema.load_state_dict(result.ema)
    for callback, state in zip(trainer.callbacks, result.callbacks, strict=True):
        callback.load_state_dict(state)
    trainer.history.load_state_dict(result.history)
    trainer.position = result.position
    trainer.batch_size = result.batch_size
    trainer.findings = result.findings
    trainer.explanation = result.explanation


@contextmanager
def rollback_on_error(trainer: TrainerCore) -> Iterator[None]:
    """Restore the trainer's state if an exception is raised, as after a failed fit on ranks, which train copies."""
    before = copy.deepcopy(_gather(trainer, {name: each.state_dict() for name, each in trainer.optimizers.items()}))
    try:
        yield
    except BaseException:
        load_result(trainer, before)
        for optimizer in trainer.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        raise


def _public(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in plain_attributes(module).items() if name[0] != "_" and name != "training"}
