# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1: each rank keeps the optimizer state of its share of the parameters, updates them and broadcasts them.

Imported only for `shard="optimizer"`: torch's module is slow to import and emits a DeprecationWarning.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.optim import LBFGS, Optimizer

from ddpilot.errors import LoopError
from ddpilot.group.device import broadcast_tensors
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.optimizers import check_groups
from ddpilot.training.models.registry import parameters_of

with warnings.catch_warnings():  # torch's own use of `torch.jit.script`
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def shard_optimizer(optimizer: Optimizer, group: GroupLike) -> Optimizer:
    """Return an optimizer equivalent to `optimizer`, with its state sharded over ranks.

    Returns `optimizer` itself with one rank. Every rank must call it with the same parameters in the same order. Raises
    LoopError for optimizers that cannot be sharded.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise _error("it is sharded already", "Pass the optimizer itself: prepare() shards it.")
    if isinstance(optimizer, LBFGS):
        found = "LBFGS, which updates all parameters together, so a shard of them would be updated differently"
        raise _error(found, "Use an optimizer that updates each parameter independently, such as AdamW or SGD.")
    types = sorted({str(one.dtype) for one in parameters_of(optimizer)})
    if len(types) > 1:
        found = f"parameters of {' and '.join(types)}, and torch's ZeroRedundancyOptimizer takes one dtype"
        raise _error(found, "Make an optimizer for each dtype, and pass both to prepare().")
    return optimizer if group.world_size == 1 or not isinstance(group, Group) else ZeroOptimizer(optimizer, group)


class ZeroOptimizer(ZeroRedundancyOptimizer):
    """An optimizer with the class, options, groups and state of `original`, sharded over ranks. `step` is collective.

    Schedulers of either work: the parameter groups are the same objects. Using `original` itself then raises LoopError.
    """

    def __init__(self, original: Optimizer, group: Group) -> None:
        self._original = original
        self._group = group
        make: Any = self._make_local  # torch expects a class, and calls it with this rank's groups
        super().__init__(original.param_groups, make, process_group=group.process_group, **original.defaults)
        original.param_groups = self.param_groups
        original.state.clear()
        refuse = _make_refusal(group)
        original.__dict__.update(dict.fromkeys(("step", "add_param_group", "state_dict", "load_state_dict"), refuse))

    def _make_local(self, groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        # A copy instead of a new optimizer: constructors may take other arguments than `defaults` has.
        local: Optimizer = object.__new__(type(self._original))
        local.__dict__.update(self._original.__dict__)
        local.__dict__.pop("step", None)  # set if a scheduler counts the original's steps
        local.param_groups = groups
        local.state = defaultdict(dict)
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter in self._original.state:
                local.state[parameter] = self._original.state[parameter]
        return local

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Update this rank's share, then exchange updated parameters. Collective; a `closure` runs on all ranks."""
        self._original.__dict__["_opt_called"] = True  # a scheduler of the original checks whether it stepped
        return super().step(closure, **options)

    def state_dict(self) -> NoReturn:
        """Raise LoopError: the state is spread over all ranks."""
        raise LoopError(
            "reading the state of a sharded optimizer",
            found=f"rank {self._group.rank} has the state of its own parameters only",
            fix="Call ddpilot.full_state(optimizer) on every rank: rank 0 gets all of it.",
            rank=self._group.rank,
        )

    def gather_state(self) -> dict[str, Any]:
        """Return the unsharded `state_dict()`, complete on rank 0, without state on the other ranks. Collective."""
        state: dict[int, dict[str, Any]] = {}
        places = self._places()
        mine = {places[parameter]: values for parameter, values in self.optim.state.items()}
        outlines = self._group.all_gather_object(
            {number: {name: _outline(value) for name, value in values.items()} for number, values in mine.items()}
        )
        for owner, outline in enumerate(outlines):
            own = mine if owner == self._group.rank else {}
            for number, values in outline.items():
                tensors = own.get(number, {})
                found = {name: self._fetch(value, tensors.get(name), owner) for name, value in values.items()}
                if self._group.is_rank_zero:
                    state[number] = found
        groups = Optimizer.state_dict(self)["param_groups"]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's share of a full state, from `full_state` or an optimizer that is not sharded."""
        check_groups(self, state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        number_of = {parameter: saved[place] for parameter, place in self._places().items()}
        groups = []
        for theirs, mine in zip(state_dict["param_groups"], self.optim.param_groups, strict=True):
            groups.append({**theirs, "params": [number_of[parameter] for parameter in mine["params"]]})
        kept = {number for group in groups for number in group["params"]}
        state = {number: value for number, value in state_dict["state"].items() if number in kept}
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        for theirs, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            options = {name: value for name, value in theirs.items() if name not in ("params", "param_names")}
            mine.update(copy.deepcopy(options))

    def _places(self) -> dict[torch.Tensor, int]:
        """Return the index in a state dict of every parameter, of all ranks."""
        return {parameter: place for place, parameter in enumerate(parameters_of(self))}

    def _fetch(self, outline: Any, own: torch.Tensor | None, owner: int) -> Any:
        """Return the value itself, if it is not a tensor to fetch, or the tensor of rank `owner`.

        Collective for a tensor.
        """
        if not isinstance(outline, _Shape):
            return outline
        shape, dtype = outline
        if own is not None:
            broadcast_tensors([own], self._group, owner)
            return own
        received = torch.empty(shape, dtype=dtype, device=self._group.device)
        broadcast_tensors([received], self._group, owner)
        return received.cpu() if self._group.is_rank_zero else None


class _Shape(tuple[Any, ...]):
    """Shape and dtype of a tensor to be received."""


def _outline(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Shape((tuple(value.shape), value.dtype)) if value.ndim else value.detach().cpu().clone()


def _make_refusal(group: Group) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise LoopError(
            "using an optimizer",
            found='it was passed to prepare(..., shard="optimizer"), and its state is in the returned optimizer',
            fix="Write model, optimizer = loop.prepare(model, optimizer, ...), and use the returned optimizer.",
            rank=group.rank,
        )

    refuse.__dict__["_wrapped_by_lr_sched"] = True  # otherwise a scheduler warns that `step` was replaced
    return refuse


def _error(found: str, fix: str) -> LoopError:
    return LoopError('preparing an optimizer with `shard="optimizer"`', found=found, fix=fix)
