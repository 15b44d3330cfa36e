# SPDX-License-Identifier: Apache-2.0
"""Run a Trainer method on new ranks, on the current rank, or in this process; load the result of a fit."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ddpilot.data.nested import module_attributes
from ddpilot.environments.detect import detect_topology
from ddpilot.errors import RankError
from ddpilot.group.decorators import pickled, unpickled
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.init_group import init_group
from ddpilot.group.protocol import FakeGroup, GroupLike
from ddpilot.launcher import Launcher
from ddpilot.launching.exception_report import report_exception
from ddpilot.launching.first_failure import RankEnd, build_error
from ddpilot.launching.rank_reports import Raised
from ddpilot.launching.shipping.pickling import RankResults
from ddpilot.launching.shipping.torch_settings import OnRank
from ddpilot.module_names import TRAINER_PRELOAD
from ddpilot.trainer.core import TrainerCore
from ddpilot.training.models.optimizers import full_state
from ddpilot.training.models.sharding import has_sharded_layer
from ddpilot.training.models.strategy import strategy_of


def is_on_ranks() -> bool:
    """True if this process is already a rank: of a launch, of torchrun, Slurm or MPI, or of a session.

    False for a notebook that is the only task of a Slurm job, or that has a process group of size 1.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    topology = detect_topology(os.environ)
    return topology.world_size > 1 or topology.environment in ("ddpilot", "torchrun")


def report_ignored_ranks(nproc_per_node: int | str | None) -> None:
    """Report on rank 0 that `nproc_per_node` has no effect, as this process is already a rank."""
    if not isinstance(nproc_per_node, int) or nproc_per_node == 0 or not is_on_ranks():
        return
    topology = detect_topology(os.environ)
    rank, size = topology.rank, topology.world_size
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and size != nproc_per_node:
        sys.stderr.write(
            f"ddpilot: nproc_per_node={nproc_per_node} is not used: this process is rank 0 of {size} already, as its "
            "environment or process group states, and trains there\n"
        )


def run_on_ranks(
    trainer: TrainerCore, nproc_per_node: int | str | None, name: str, function: Callable[..., Any], *args: Any
) -> RankResults:
    """Call `function(trainer, *args)`, for the method `name`, on new ranks. Raises what `Launcher.run` raises."""
    launcher = trainer.launcher or Launcher()
    count = launcher.nproc_per_node if nproc_per_node is None else nproc_per_node
    launcher = replace(launcher, nproc_per_node=count, preload=(*TRAINER_PRELOAD, *launcher.preload))
    return launcher.run(OnRank(function, f"Trainer.{name}"), trainer, *args)


def run_once(
    trainer: TrainerCore, nproc_per_node: int | str | None, name: str, function: Callable[..., Any], *args: Any
) -> Any:
    """Return `function(trainer, *args)` of this rank, of this process if `nproc_per_node` is 0, or of a new rank 0."""
    if is_on_ranks() or nproc_per_node == 0:
        return function(trainer, *args)
    return run_on_ranks(trainer, nproc_per_node, name, function, *args)[0]


def group_here() -> GroupLike:
    """Return the group of this rank; outside of ranks a group of size 1 without a network. Collective on ranks."""
    if is_on_ranks():
        return init_group()
    return FakeGroup(device=use_device(resolve_device(detect_device_facts(os.environ, 0))), backend="none")


_COPIED = ("position", "batch_size", "findings", "explanation")
"""Attributes of a trainer that are replaced by those after the fit."""


@dataclass(frozen=True)
class FitResult:
    """The state and errors that rank 0 returns after a fit."""

    state: dict[str, Any]
    """The state of the trainer, as `load_state` takes it; tensors are on the CPU."""
    late_error: tuple[Raised, bytes | None] | None
    """Exception that a callback on rank 0 raised after the last update, and the result of `pickled` for it; or None."""


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
    return FitResult(
        _read_state(trainer, optimizers) | whole,
        None if late_error is None else (report_exception(late_error), pickled(late_error)),
    )


def unpack_late_error(late_error: tuple[Raised, bytes | None], num_ranks: int) -> RankError:
    """Return the error to raise in the notebook if a callback on rank 0 raised after the last update.

    The original exception is its cause, if it could be pickled. `num_ranks`: number of ranks of the fit.
    """
    raised, shipped = late_error
    cause = unpickled(shipped)
    failure = RankEnd(rank=0, raised=raised, error=cause, since_s=raised.time_s)
    error = build_error(
        failure, function_name="Trainer.fit", num_ranks=num_ranks, last_lines=(), victims=(), returned=()
    )
    error.fix = "Training had already ended: the trained weights and the history were loaded here"
    error.__cause__ = cause
    return error


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
