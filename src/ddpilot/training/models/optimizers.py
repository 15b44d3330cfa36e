# SPDX-License-Identifier: Apache-2.0
"""Optimizers: their full state, sharded or not, for checkpoints; clearing gradients; closures and schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot.errors import LoopError, MismatchedCheckpointError
from ddpilot.training.losses import Objective


@runtime_checkable
class ShardedState(Protocol):
    """An optimizer whose state is sharded: each rank holds the state of its own parameters."""

    def gather_state(self) -> dict[str, Any]:
        """Return the state of all ranks. Collective."""


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this rank's own parameters, if `optimizer` is sharded; else `optimizer` itself."""
    inner = getattr(optimizer, "optim", None)  # of a ZeroRedundancyOptimizer, which is slow to import
    return inner if isinstance(inner, Optimizer) else optimizer


def full_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the unsharded `optimizer.state_dict()`, complete on rank 0. Collective if the optimizer is sharded.

    The other ranks get the same groups and, for a sharded optimizer, no state. Tensors from other ranks are on the CPU;
    a rank's own tensors are not copied: the next update changes them.
    """
    return optimizer.gather_state() if isinstance(optimizer, ShardedState) else optimizer.state_dict()


def load_full_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of `full_state` from rank 0, at any world_size, sharded or not. Not collective.

    Every rank passes the full state; a sharded optimizer loads the part of its own parameters. As with torch's
    `load_state_dict`, tensors of the right dtype and device are not copied. Raises MismatchedCheckpointError if the
    parameter groups do not match; the optimizer is left unchanged.
    """
    check_groups(optimizer, state)
    optimizer.load_state_dict(dict(state))


def check_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise MismatchedCheckpointError unless `state` has the parameter groups of `optimizer`, of the same sizes."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise MismatchedCheckpointError(
            "loading the state of an optimizer",
            found=f"its groups have {_join(saved)} parameters, the groups of this {type(optimizer).__name__} have "
            f"{_join(own)}",
            fix="Create the optimizer with the same groups as in the saved run, of the same model.",
        )


def _join(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"


def clear_gradients(optimizer: Optimizer) -> None:
    """Clear the gradients of `optimizer`, as `zero_grad()` does, but without the profiler overhead of torch's own."""
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


_DID = "updating the weights with a closure"


def check_closure(optimizer: Optimizer, accumulation: int, is_fp16: bool) -> None:
    """Raise LoopError for options that a closure does not support. Not collective; the same on every rank.

    These are accumulation over several batches, fp16 and an optimizer whose state is sharded.
    """
    if accumulation > 1:
        found = f"`accumulate` is {accumulation}, and a closure computes the loss of one batch"
        raise LoopError(_DID, found=found, fix="Use Loop(accumulate=1) with larger batches.")
    if is_fp16:
        found = "`precision` is 'fp16', whose gradients are scaled within the closure"
        raise LoopError(_DID, found=found, fix="Use Loop(precision='bf16') or 'fp32'.")
    if isinstance(optimizer, ShardedState):
        found = "the state of the optimizer is sharded, so each rank would step independently"
        raise LoopError(_DID, found=found, fix='Prepare it without shard="optimizer".')


def needs_closure(optimizer: Optimizer) -> LoopError:
    """Return the error for an optimizer whose `step` requires a closure and got none."""
    return LoopError(
        "updating the weights",
        found=f"{type(optimizer).__name__} requires a closure, and none was passed",
        fix="Write loop.step(optimizer, closure=closure), with a function that runs forward and loop.backward(loss).",
    )


def step_scheduler(scheduler: Any, objective: Objective | None) -> None:
    """Step `scheduler` after an update; a ReduceLROnPlateau by the update's mean loss. Collective then.

    Raises LoopError if `objective` has not recorded that loss.
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
        return
    if objective is None or not objective.is_known:
        raise LoopError(
            "stepping a ReduceLROnPlateau",
            found="it was not prepared, so the loss of the update was not kept for it",
            fix="Write scheduler = loop.prepare(scheduler); or call scheduler.step() once per epoch with a value "
            "that is the same on all ranks, such as the result of loop.reduce or loop.evaluate.",
        )
    scheduler.step(objective.reduce().item())
