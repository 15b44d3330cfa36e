# SPDX-License-Identifier: Apache-2.0
"""Optimizers: their full state, sharded or not, for checkpoints; clearing gradients; closures and schedulers."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddpilot.data.nested import iterate_tensors, map_tensors
from ddpilot.errors import LoopError, MismatchedCheckpointError
from ddpilot.group.device import broadcast_tensors
from ddpilot.group.protocol import GroupLike
from ddpilot.training.loss_weights import Objective
from ddpilot.training.models.registry import parameters_of
from ddpilot.training.models.sharding import divide_as, gather, has_shards, is_shard
from ddpilot.training.models.strategy import strategy_of


@runtime_checkable
class ShardedState(Protocol):
    """An optimizer whose state is sharded: each rank holds the state of its own parameters."""

    def gather_state(self) -> dict[str, Any]:
        """Return the state of all ranks. Collective."""


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this rank's own parameters, if `optimizer` is sharded; else `optimizer` itself."""
    inner = getattr(optimizer, "optim", None)  # of a ZeroRedundancyOptimizer, which is slow to import
    return inner if isinstance(inner, Optimizer) else optimizer


def share_state(optimizer: Optimizer, group: GroupLike) -> None:
    """Overwrite the state and the options of `optimizer` with those of rank 0, if any rank has a state. Collective.

    As DDP does with the parameters. Not of an optimizer of which each rank has a shard. Options that cannot be pickled,
    such as functions, are left as they are.
    """
    if group.world_size == 1 or isinstance(optimizer, ShardedState) or has_own_shards(optimizer):
        return
    has_state = torch.tensor([float(bool(optimizer.state))], device=group.device)
    if not group.all_reduce(has_state, "max").item():
        return
    parameters = list(parameters_of(optimizer))
    state = {number: optimizer.state[one] for number, one in enumerate(parameters) if one in optimizer.state}
    held: dict[Any, Any] = optimizer.state
    more = {key: value for key, value in held.items() if not isinstance(key, torch.Tensor)}
    options = [
        {name: value for name, value in own.items() if name != "params" and _is_picklable(value)}
        for own in optimizer.param_groups
    ]
    whole: Any = {"state": state, "more": more, "options": options}
    devices = [one.device.type for one in iterate_tensors(whole)]
    outline, devices = group.broadcast_object((map_tensors(whole, lambda one: one.to("meta")), devices))
    if not group.is_rank_zero:
        places = iter(devices)  # torch's Adam counts its steps on the CPU

        def allocate(one: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(one, device="cpu" if next(places) == "cpu" else group.device)

        whole = map_tensors(outline, allocate)
    broadcast_tensors(iterate_tensors(whole), group)
    if not group.is_rank_zero:
        optimizer.state.clear()
        optimizer.state.update(whole["more"])
        for number, values in whole["state"].items():
            optimizer.state[parameters[number]] = values
        for own, values in zip(optimizer.param_groups, whole["options"], strict=True):
            own.update(values)


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(map_tensors(value, lambda one: one.to("meta")))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def full_state(thing: Optimizer | nn.Module) -> dict[str, Any]:
    """Return the unsharded `state_dict()` of an optimizer or model, complete on rank 0. Collective if it is sharded.

    On the other ranks, a sharded model gives {}, and a sharded optimizer its groups without state. Unsharded ones give
    the same on every rank. The state_dict of a DDP model is that of the module inside. A model prepared with
    `sync_every` is averaged first, which is collective.

    Tensors from other ranks are on the CPU. A rank's own tensors are not copied: the next update changes them.
    """
    if isinstance(thing, nn.Module):
        return strategy_of(thing).weights(
            keeps=not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        )
    if isinstance(thing, ShardedState):
        return thing.gather_state()
    state = thing.state_dict()
    return _gather(state) if has_shards(parameters_of(thing)) else state


def load_full_state(thing: Optimizer | nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `full_state` into an optimizer or model, at any world_size, sharded or not. Not collective.

    Every rank passes the complete state, which `full_state` of sharded objects returns on rank 0 only: send it to the
    other ranks first. A sharded optimizer or model loads its own part. As with torch's `load_state_dict`, an
    optimizer's tensors of the right dtype and device are not copied. Raises MismatchedCheckpointError if the parameter
    groups of an optimizer do not match; it is then unchanged.
    """
    if isinstance(thing, nn.Module):
        strategy_of(thing).load_weights(state)
        return
    check_groups(thing, state)
    given = dict(state)
    if has_shards(parameters_of(thing)):
        saved = [number for group in state["param_groups"] for number in group["params"]]
        own = dict(zip(saved, parameters_of(thing), strict=True))
        given["state"] = {
            number: {name: divide_as(own[number], value) for name, value in values.items()}
            for number, values in state["state"].items()
        }
    thing.load_state_dict(given)


def has_own_shards(optimizer: Optimizer) -> bool:
    """True if `optimizer` updates this rank's shards of parameters."""
    return has_shards(parameters_of(optimizer))


def state_without_shards(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, str], torch.Tensor]]:
    """Split a state_dict of an optimizer into what is the same on all ranks, and shards by (number, name)."""
    shards = {
        (str(number), name): value
        for number, values in state["state"].items()
        for name, value in values.items()
        if is_shard(value)
    }
    rest = {
        number: {name: value for name, value in values.items() if not is_shard(value)}
        for number, values in state["state"].items()
    }
    return {**state, "state": rest}, shards


def make_shards(
    optimizer: Optimizer, state: Mapping[str, Any], outlines: Mapping[tuple[str, ...], torch.Tensor]
) -> dict[tuple[str, ...], torch.Tensor]:
    """Return tensors without values, divided as the parameters are, for each of `outlines`, by (number, name)."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    own = dict(zip(map(str, saved), parameters_of(optimizer), strict=True))
    return {
        path: torch.empty_like(own[path[0]].detach(), dtype=outline.dtype)
        if is_shard(own[path[0]]) and own[path[0]].shape == outline.shape
        else torch.empty_like(outline, device="cpu")
        for path, outline in outlines.items()
    }


def _gather(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict of sharded tensors with whole ones, on rank 0; others get no state. Collective."""
    keeps = torch.distributed.get_rank() == 0
    whole = {
        number: {name: gather(value, keeps=keeps) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": whole if keeps else {}}


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
    for group in optimizer.param_groups:  # a generator would cost as much as the rest
        for parameter in group["params"]:
            parameter.grad = None


_DID = "updating the weights with a closure"


def requires_closure(optimizer: Optimizer) -> bool:
    """True if the `step` of `optimizer` has a parameter `closure` without a default, as that of LBFGS."""
    taken = inspect.signature(type(optimizer).step).parameters.get("closure")
    return taken is not None and taken.default is inspect.Parameter.empty


def check_closure(optimizer: Optimizer, group_size: int, is_fp16: bool, *, ahead: bool = False) -> None:
    """Raise LoopError for options that a closure does not support. Not collective; the same on every rank.

    These are a group of several batches per update, fp16, an optimizer whose state is sharded, and with `ahead` one
    whose parameters are.
    """
    if group_size > 1:
        found = f"`accumulate` is {group_size}, and a closure computes the loss of one batch"
        raise LoopError(_DID, found=found, fix="Use Loop(accumulate=1) with larger batches.")
    if is_fp16:
        found = "`precision` is 'fp16', whose gradients are scaled within the closure"
        raise LoopError(_DID, found=found, fix="Use Loop(precision='bf16') or 'fp32'.")
    if isinstance(optimizer, ShardedState):
        found = "the state of the optimizer is sharded, so each rank would step independently"
        raise LoopError(_DID, found=found, fix='Prepare it without shard="optimizer".')
    if ahead and has_shards(parameters_of(optimizer)):
        found = "`ahead`, with parameters that are sharded: each rank would compare its own shards only"
        raise LoopError(_DID, found=found, fix='Leave out `ahead`, or prepare without shard="parameters".')


def is_about_closure(error: Exception) -> bool:
    """True if an optimizer raised `error` as it got no closure: by its text, or the line of the program, says so."""
    frames = traceback.extract_tb(error.__traceback__)
    return "closure" in str(error) or (bool(frames) and "closure" in (frames[-1].line or ""))


def needs_closure(optimizer: Optimizer) -> LoopError:
    """Return the error for an optimizer whose `step` requires a closure and got none."""
    return LoopError(
        "updating the weights",
        found=f"{type(optimizer).__name__} requires a closure, and none was passed",
        fix="Write loop.step(optimizer, closure=closure), with a function that runs forward and loop.backward(loss); "
        "for a Trainer, pass `closure=True`.",
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
