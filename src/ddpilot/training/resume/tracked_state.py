# SPDX-License-Identifier: Apache-2.0
"""`TrackedState`: the objects with a state_dict that a checkpoint holds, by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ddpilot.checkpoint.format import STATE_FILE, STATE_NAMES, Checkpoint, check_layout, part_file
from ddpilot.checkpoint.safetensors_file import DTYPE_NAMES, plain_names
from ddpilot.checkpoint.weights import match_weights
from ddpilot.errors import CheckpointError, CorruptCheckpointError, LoopError, MismatchedCheckpointError
from ddpilot.group.device import broadcast_tensors
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.optimizers import (
    check_groups,
    full_state,
    has_own_shards,
    load_full_state,
    local_optimizer,
    make_shards,
    state_without_shards,
)
from ddpilot.training.models.sharding import has_sharded_layer, is_shard
from ddpilot.training.models.strategy import read_weights, strategy_of

if TYPE_CHECKING:
    from ddpilot.checkpoint.shard_files import ShardReader

Weights = dict[str, dict[str, torch.Tensor]]
Shards = dict[tuple[str, ...], torch.Tensor]
"""Sharded tensors by (model, parameter) or (optimizer, "state", number, name); on rank 0 also their models' buffers."""
Redistribute = Callable[[list[Any], int, int], Any]
"""Takes the saved states of all ranks, in rank order, a rank and the world_size now; returns the state of that rank."""
OWN = "own"
"""Key of the states in a rank's part of a checkpoint."""


@dataclass(frozen=True)
class _RankState:
    """An object of which each rank saves its own state."""

    thing: Any
    redistribute: Redistribute | None
    """Returns a rank's state from those of a different number of ranks."""
    instead: str
    """What its state is if a checkpoint has none for this rank, such as "begins again"; "": that is an error."""


def has_state(thing: object) -> bool:
    """True if `thing` has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict"))


class TrackedState:
    """The objects that a run saves, by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._optional: set[str] = set()
        self._per_rank: dict[str, _RankState] = {}
        """Those of which each rank saves its own state, and others, such as the errors of PowerSGD."""

    def add(self, thing: Any, name: str | None = None, *, optional: bool = False) -> None:
        """Add `thing`; without a `name` it is named after its kind, such as "model" or "optimizer2".

        An object that was added before, also inside a different DDP model, is replaced and gets the new name.
        `optional`: True if a checkpoint may lack it. Raises LoopError if the name is taken or is not made of letters,
        digits and `_`, and for an object without `state_dict` and `load_state_dict`.
        """
        if not has_state(thing):
            raise _error(f"a {type(thing).__name__}", "Pass objects with `state_dict` and `load_state_dict`.")
        before = next((known for known, other in self._objects.items() if _inner(other) is _inner(thing)), None)
        if name is None:
            name = before or self._free_name(_kind(thing))
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise _error(f"the name {name!r}", "Use letters, digits and `_`: it becomes a file name.")
        if name in self._objects and name != before:
            raise _error(f"a second {name!r}", "Choose a different name.")
        if name != before and before in self._per_rank and not self._per_rank[before].instead:
            del self._per_rank[before]
        self._objects = {name if known == before else known: other for known, other in self._objects.items()}
        self._objects[name] = thing
        if optional:
            self._optional.add(name)

    def add_per_rank(
        self, thing: Any, name: str, redistribute: Redistribute | None = None, *, instead: str = ""
    ) -> None:
        """Add an object of which each rank saves its own state, in place of an earlier one under `name`.

        At a different number of ranks, `redistribute` returns the state of a rank; None: that is an error. `instead`:
        what the state is then, in place of that error; the object may also be saved as that of rank 0. Raises LoopError
        for a model or an optimizer without it, and what `add` raises.
        """
        if not instead and isinstance(thing, nn.Module | Optimizer):
            found = f"{name!r}, a {type(thing).__name__}, with `per_rank=True`: it is the same on all ranks"
            raise _error(found, "Pass it to `prepare`, or track what differs between ranks.")
        if not instead:
            self.add(thing, name)
        self._per_rank[name] = _RankState(thing, redistribute, instead)

    def drop_per_rank(self, name: str) -> None:
        """Save no state of each rank under `name` any more."""
        self._per_rank.pop(name, None)

    def replace(self, old: Optimizer, new: Optimizer) -> None:
        """Replace `old` by `new` under the same name, and remove schedulers of `old`."""
        objects = {name: other for name, other in self._objects.items() if other is not new}
        is_schedule = (LRScheduler, ReduceLROnPlateau)
        self._objects = {
            name: new if other is old else other
            for name, other in objects.items()
            if not (isinstance(other, is_schedule) and getattr(other, "optimizer", None) is old)
        }

    def name_of(self, thing: object) -> str:
        """Return the name of `thing`, also inside a different DDP model; "" if it was not added."""
        return next((name for name, other in self._objects.items() if _inner(other) is _inner(thing)), "")

    @property
    def has_shards(self) -> bool:
        """True if each rank has shards of a model or of an optimizer's state. The same on every rank."""
        has_model = any(has_sharded_layer(_inner(model)) for _, model in self._models())
        return has_model or any(isinstance(one, Optimizer) and has_own_shards(one) for one in self._objects.values())

    def collect(self, group: GroupLike, *, divided: bool = False) -> tuple[Weights, dict[str, Any], Shards]:
        """Return the models' weights, the state dicts of the other objects, and shards; of rank 0 all are saved.

        Under "own" are those of objects of which each rank saves its own, and which are not part of rank 0's.
        `divided`: return this rank's shards by their paths, instead of gathering them on rank 0, which also returns
        the rest of their models there. Broadcasts the buffers of rank 0 first. Collective, also on a rank where an
        object fails: CheckpointError, with the name of the first one that failed, is raised at the end.
        """
        found = _Collected(group, divided)
        failure: CheckpointError | None = None
        for name, thing in [*self._objects.items(), *self._per_rank.items()]:
            try:
                if isinstance(thing, nn.Module):
                    found.add_model(name, thing)
                elif isinstance(thing, Optimizer):
                    found.add_optimizer(name, thing)
                elif isinstance(thing, _RankState):
                    found.state[OWN][name] = {"state": thing.thing.state_dict(), "is_optional": bool(thing.instead)}
                elif name not in self._per_rank:
                    found.state["others"][name] = thing.state_dict()
            except Exception as error:  # noqa: BLE001  (raised below: the other ranks are in the collectives to come)
                kind = type(thing.thing if isinstance(thing, _RankState) else thing).__name__
                text = f"{name!r} ({kind}) raised {type(error).__name__}: {error}"
                failure = failure or CheckpointError("collecting the state to save", found=text, rank=group.rank)
                failure.__cause__ = failure.__cause__ or error
        if failure is not None:
            raise failure
        return found.weights, found.state, found.shards

    def match(self, found: Checkpoint, group: GroupLike) -> Callable[[], list[str]]:
        """Read and compare the checkpoint `found`; return a function that loads it into all objects.

        That function returns what becomes of those states of each rank that the checkpoint lacks. Raises
        MismatchedCheckpointError with the differences in names, shapes, optimizer classes and parameter groups, and for
        states of each rank at another number of ranks without a function that redistributes them.
        """
        state = found.state_without_shards()
        check_layout(found, STATE_FILE, state, STATE_NAMES)
        check_layout(found, STATE_FILE, state["optimizers"], state["optimizers"])
        own, required = self._rank_states(found, group)
        self._check_names(found, [*state["extra"], *state["optimizers"], *state["others"], *required])
        shards = found.shards()
        matched = {name: self._match(name, model, found, state, shards) for name, model in self._models()}
        for name, thing in self._objects.items():
            if name in state["optimizers"]:
                _check_optimizer(name, thing, state["optimizers"][name], state["kinds"][name], found)
        return lambda: self._load(found, matched, state, own, shards)

    def _load(
        self,
        found: Checkpoint,
        matched: Mapping[str, dict[str, Any]],
        state: Mapping[str, Any],
        own: Mapping[str, Any],
        shards: ShardReader | None,
    ) -> list[str]:
        for name, model in self._models():
            if shards is not None and has_sharded_layer(_inner(model)):
                read_weights(_inner(model), name, matched[name], shards)
            else:
                strategy_of(_inner(model)).load_weights(matched[name])
            if isinstance(model, AveragedModel):
                model.n_averaged.copy_(state["extra"][name]["n_averaged"])
        for name, saved in (state["optimizers"] | state["others"]).items():
            thing = self._objects.get(name)
            if thing is not None:  # None: a scaler, and this run does not use fp16
                load = functools.partial(_load_optimizer, name, thing, shards) if isinstance(thing, Optimizer) else None
                _load_state(found, name, thing, saved, load)
        for name, saved in own.items():  # after those of rank 0 of the same name
            _load_state(found, name, self._per_rank[name].thing, saved)
        return [f"{name} {one.instead}" for name, one in self._per_rank.items() if name not in own]

    def _rank_states(self, found: Checkpoint, group: GroupLike) -> tuple[dict[str, Any], list[str]]:
        """Return this rank's states by name, and the names of all of which each rank has saved its own."""
        before, now = found.manifest.progress.world_size, group.world_size
        first = (found.part(group.rank if before == now else 0) or {}).get(OWN, {})
        others = range(1, before) if first and before != now else ()
        parts = [first, *((found.part(rank) or {}).get(OWN, {}) for rank in others)]
        for rank, part in zip([group.rank if before == now else 0, *others], parts, strict=True):
            check_layout(found, part_file(rank), part, part)
        states: dict[str, Any] = {}
        for name, saved in first.items():
            known = self._per_rank.get(name)
            if known is None:  # `_check_names` names it
                continue
            if before == now:
                states[name] = saved["state"]
            elif known.redistribute is not None:
                states[name] = known.redistribute([part[name]["state"] for part in parts], group.rank, now)
            elif not known.instead:
                what = f"{name!r} has a state for each of {before} ranks, and there are {now}"
                fix = (
                    f"Resume on {before} ranks, or say what each rank gets: loop.track({name}=..., per_rank=True, "
                    "redistribute=lambda states, rank, world_size: ...)."
                )
                raise MismatchedCheckpointError(f"resuming from {found.path}", found=what, fix=fix)
        return states, [name for name, saved in first.items() if not saved["is_optional"]]

    def _models(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, thing) for name, thing in self._objects.items() if isinstance(thing, nn.Module))

    def _match(
        self, name: str, model: nn.Module, found: Checkpoint, state: Mapping[str, Any], shards: ShardReader | None
    ) -> dict[str, Any]:
        extra = {key: value for key, value in state["extra"][name].items() if key != "n_averaged"}
        # The shards of a sharded model are read into place.
        outlined = shards.outlined_weights(name) if shards is not None and has_sharded_layer(_inner(model)) else {}
        weights = outlined or found.weights(name)
        return match_weights(_inner(model), {**weights, **extra}, source=f"{name!r} of {found.path}")

    def _check_names(self, found: Checkpoint, saved: Sequence[str]) -> None:
        missing = [name for name in self._objects if name not in saved and name not in self._optional]
        unexpected = [name for name in saved if name not in self._objects and name not in ("scaler", "logged")]
        if missing or unexpected:
            parts = [f"it lacks {', '.join(map(repr, missing))}"] * bool(missing)
            parts += [f"it has {', '.join(map(repr, unexpected))}, which this run lacks"] * bool(unexpected)
            raise _mismatch(found, "; ".join(parts))

    def _free_name(self, kind: str) -> str:
        number = 1
        while (name := kind if number == 1 else f"{kind}{number}") in self._objects:
            number += 1
        return name


def _kind(thing: object) -> str:
    if isinstance(thing, AveragedModel):
        return "averaged"
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, LRScheduler | ReduceLROnPlateau):
        return "scheduler"
    return "optimizer" if isinstance(thing, Optimizer) else type(thing).__name__.lower()


def _class_of(optimizer: Optimizer) -> str:
    """Return the class name that determines the format of the state."""
    return type(local_optimizer(optimizer)).__name__


def _inner(thing: Any) -> Any:
    """Return the module whose weights are saved: without DDP, and without the wrapper of `AveragedModel`."""
    return _inner(thing.module) if isinstance(thing, DistributedDataParallel | AveragedModel) else thing


class _Collected:
    """What `TrackedState.collect` returns, while it is collected."""

    def __init__(self, group: GroupLike, divided: bool) -> None:
        self._group = group
        self._divided = divided
        self.weights: Weights = {}
        self.shards: Shards = {}
        self.state: dict[str, Any] = {"optimizers": {}, "others": {}, "extra": {}, "kinds": {}, OWN: {}}

    def add_model(self, name: str, model: nn.Module) -> None:
        """Add the weights of `model`, or this rank's shards of them. Collective."""
        is_rank_zero = self._group.is_rank_zero
        broadcast_tensors(_inner(model).buffers(), self._group)
        own, self.state["extra"][name] = _split(model, keeps=is_rank_zero, divided=self._divided)
        if self._divided and has_sharded_layer(_inner(model)):
            self.shards.update({(name, key): one for key, one in own.items() if is_rank_zero or is_shard(one)})
        else:
            self.weights[name] = own

    def add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Add the state of `optimizer`, or this rank's shards of it. Collective if it is gathered."""
        self.state["kinds"][name] = _class_of(optimizer)
        if self._divided and has_own_shards(optimizer):
            self.state["optimizers"][name], parts = state_without_shards(optimizer.state_dict())
            self.shards.update({(name, "state", *path): one for path, one in parts.items()})
        else:
            self.state["optimizers"][name] = full_state(optimizer)


def _split(model: nn.Module, *, keeps: bool, divided: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split the state of a model, by plain names, into tensors that safetensors supports and the rest.

    `divided`: with this rank's shards of a model that is sharded; else it is whole if `keeps`.
    """
    strategy = strategy_of(_inner(model))
    state = strategy.own_weights() if divided else strategy.weights(keeps=keeps)
    plain = {short: state[full] for full, short in plain_names(state).items()}
    weights = {
        name: value
        for name, value in plain.items()
        if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES and value.layout == torch.strided
    }
    extra = {name: value for name, value in plain.items() if name not in weights}
    if isinstance(model, AveragedModel):
        extra["n_averaged"] = model.n_averaged
    return weights, extra


def _load_optimizer(name: str, optimizer: Optimizer, shards: ShardReader | None, saved: Mapping[str, Any]) -> None:
    load_full_state(optimizer, saved if shards is None else _with_shards(name, optimizer, saved, shards))


def _with_shards(name: str, optimizer: Optimizer, saved: Mapping[str, Any], shards: ShardReader) -> dict[str, Any]:
    """Return the state of an optimizer, with this rank's shards of it, or whole if `optimizer` is not sharded."""
    read = make_shards(optimizer, saved, shards.outlines(name, "state"))
    shards.read_into({(name, "state", *path): one for path, one in read.items()})
    state = {number: dict(values) for number, values in saved["state"].items()}
    for (number, key), value in read.items():
        state.setdefault(int(number), {})[key] = value
    return {**saved, "state": state}


def _load_state(
    found: Checkpoint, name: str, thing: Any, saved: Any, load: Callable[[Any], object] | None = None
) -> None:
    """Load `saved` into `thing`, by its `load_state_dict` unless `load` is given. Raises MismatchedCheckpointError."""
    try:
        (load or thing.load_state_dict)(saved)
    except CorruptCheckpointError:
        raise
    except Exception as error:
        what = f"{name!r} ({type(thing).__name__}) raised {type(error).__name__}: {error}"
        raise _mismatch(found, what) from error


def _check_optimizer(name: str, own: Any, saved: Mapping[str, Any], kind: str, found: Checkpoint) -> None:
    if kind != _class_of(own):
        raise _mismatch(found, f"{name!r} was a {kind} and is a {_class_of(own)}")
    check_groups(own, saved)


def _mismatch(found: Checkpoint, what: str) -> MismatchedCheckpointError:
    return MismatchedCheckpointError(
        f"resuming from {found.path}",
        found=what,
        fix="Prepare the same objects as in the saved run, in the same order; or start over (`resume=False`) and load "
        "only the weights (`loop.load`).",
    )


def _error(found: str, fix: str) -> LoopError:
    return LoopError("adding to the state that a run saves", found=found, fix=fix)
