# SPDX-License-Identifier: Apache-2.0
"""`PreparedObjects`: models and optimizers that `prepare` returned. Names parameters in errors of DDP's reducer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from operator import is_
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import DdpilotError, LoopError, list_names
from ddpilot.training.models.ddp import Choice, unwrap
from ddpilot.training.models.sharding import ShardedOutline, is_sharded, reshard, sharded_layers


class PreparedModel:
    """A model as `prepare` returned it, with the facts of that moment."""

    def __init__(self, model: nn.Module, choices: tuple[Choice, ...] = ()) -> None:
        self.model = model
        """The returned model, in DDP with several ranks."""
        self.module = unwrap(model)
        """The model without DDP."""
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        """None with a single rank, and for a model without trainable parameters."""
        self.is_sharded = is_sharded(self.module)
        """True if each rank has a shard of every parameter."""
        self._sharded_layers = sharded_layers(self.module) if self.is_sharded else []
        self.choices = choices
        """The options of DDP with their reasons."""
        self.trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        """The parameters that required a gradient, by name."""
        self.reduced = {} if self.ddp is None else _reduced(self.ddp)
        """The parameters that DDP's reducer waits for, by name, in the reducer's order."""
        self.reduced_ids = frozenset(map(id, self.reduced.values()))
        self.has_final_buckets = self.ddp is None or (self.ddp.find_unused_parameters and not self.ddp.static_graph)
        """False until the reducer has rebuilt its buckets in the order of the gradients, which it does once."""

    def settle(self) -> None:
        """Free gathered parameters, which an optimizer's step has left outdated, as `ParallelStrategy.settle` does."""
        reshard(self._sharded_layers)

    def clear_gradients(self) -> None:
        """Clear all gradients, those of shards included while gathered parameters stand in the module for them."""
        self.model.zero_grad(set_to_none=True)
        for parameter in self.trained.values():
            parameter.grad = None

    def list_changed(self) -> list[str]:
        """Return the names of parameters that were frozen, unfrozen, added or removed since."""
        now = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        return sorted(self.trained.keys() ^ now)


class OptimizerRecord:
    """The parameters of an optimizer, and of the prepared models without it, for the checks of each step."""

    def __init__(
        self, parameters: list[nn.Parameter], models: list[PreparedModel], trained_ids: Collection[int]
    ) -> None:
        own = set(parameters)
        self.parameters = parameters
        """The parameters of all groups."""
        self.reduced = [one for one in parameters if id(one) in trained_ids]
        """Those that required a gradient when their model was prepared, so that their gradients are all-reduced."""
        self.others = [one for prepared in models for one in prepared.trained.values() if one not in own]
        """The parameters that the models train and the optimizer does not hold."""
        self.models = models
        self.is_checked = False
        """True once all parameters are known to belong to prepared models."""

    def has(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if these are the same `parameters`."""
        return len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))


class PreparedObjects:
    """The prepared models and optimizers of a loop, in order. A module that is prepared again replaces its record."""

    def __init__(self) -> None:
        self.models: list[PreparedModel] = []
        self.ddp_models: dict[DistributedDataParallel, PreparedModel] = {}
        """Those of `models` that are in DDP."""
        self.has_sharded = False
        """True if parameters of one of `models` are sharded."""
        self.moved = WeakIdKeyDictionary()
        """The sharded parameter of each one that `prepare` has replaced, as long as that is in use."""
        self.outlines: WeakKeyDictionary[nn.Module, ShardedOutline | Exception] = WeakKeyDictionary()
        """The outline of each model whose parameters `prepare` has sharded, or why it cannot be copied."""
        self.optimizers: list[Optimizer] = []
        self._records: WeakKeyDictionary[Optimizer, OptimizerRecord] = WeakKeyDictionary()
        self.replaced: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose parameters all belong to one that was prepared later."""
        self.parameter_ids: set[int] = set()
        """All parameters of all models that were ever prepared."""
        self.trained_ids: set[int] = set()
        """Those that required a gradient."""

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the models as `prepare` returned them."""
        return (one.model for one in self.models)

    def add_model(self, model: nn.Module, choices: tuple[Choice, ...] = ()) -> PreparedModel:
        """Add `model`, as `prepare` returns it, and return its record."""
        added = PreparedModel(model, choices)
        self.models = [*(one for one in self.models if one.module is not added.module), added]
        self.ddp_models = {one.ddp: one for one in self.models if one.ddp is not None}
        self.has_sharded = any(one.is_sharded for one in self.models)
        self.parameter_ids.update(map(id, model.parameters()))
        self.trained_ids.update(map(id, added.trained.values()))
        return added

    def find(self, model: nn.Module) -> PreparedModel | None:
        """Return the record of `model` as `prepare` returned it; None if there is none."""
        return next((one for one in self.models if one.model is model), None)

    def record_of(self, optimizer: Optimizer) -> OptimizerRecord:
        """Return the record of `optimizer`, prepared or not: a new one if its parameters or the models changed."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._records.get(optimizer)
        if known is None or known.models is not self.models or not known.has(parameters):
            known = self._records[optimizer] = OptimizerRecord(parameters, self.models, self.trained_ids)
        return known

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add `optimizer`, as `prepare` returns it."""
        self.replaced.discard(optimizer)
        self._records.pop(optimizer, None)
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)

    def replace_optimizers(self, earlier: tuple[Optimizer, ...], optimizer: Optimizer) -> list[Optimizer]:
        """Replace those of `earlier` whose parameters all belong to `optimizer` now, and return them."""
        taken = set(map(id, parameters_of(optimizer)))
        replaced = [
            old
            for old in self.optimizers
            if old is not optimizer and old in earlier and taken.issuperset(map(id, parameters_of(old)))
        ]
        for old in replaced:
            place = next(number for number, one in enumerate(self.optimizers) if one is old)
            rest = [one for one in self.optimizers if one is not old and one is not optimizer]
            self.optimizers = [*rest[:place], optimizer, *rest[place:]]
            self.replaced.add(old)
            self._records.pop(old, None)
        return replaced


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Return an iterator over all parameters of `optimizer`."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def has_gradients(optimizer: Optimizer) -> bool:
    """True if a parameter of `optimizer` has a gradient."""
    return any(one.grad is not None for one in parameters_of(optimizer))


def _reduced(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"
_TWICE = "Expected to mark a variable ready only once"
_MISSING = re.compile(r"did not receive grad for rank \d+: ([\d ,]+)")
_AT_INDEX = re.compile(r"Parameter at index (\d+)")
_HIDDEN = (
    "With find_unused_parameters=True everything that the loss depends on must be in the model's output: return "
    "tensors, in tuples, lists, dicts or dataclasses. "
)


class ReducerErrors:
    """Checks that the reducers of the `prepared` models got all gradients, and names the parameters in their errors."""

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared

    def order_buckets(self) -> None:
        """Rebuild the buckets of each new model once, in an order that its ranks agree on. Collective then.

        Call it after a backward pass. DDP would rebuild them in the next forward pass with gradients: a rank that runs
        an extra forward pass would wait there for the other ranks.
        """
        for model, prepared in self._prepared.ddp_models.items():
            if prepared.has_final_buckets or not is_finished(model):  # this backward pass covered only a part
                continue
            if not model._has_rebuilt_buckets:
                model._has_rebuilt_buckets = model.reducer._rebuild_buckets()
            prepared.has_final_buckets = model._has_rebuilt_buckets

    def check(self) -> None:
        """Raise LoopError if a backward pass left a parameter out, so that other ranks still wait. Not collective."""
        for model, prepared in self._prepared.ddp_models.items():
            try:
                model._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise self._left_out(error, model, prepared.reduced) from error

    def explain(self, error: BaseException) -> None:
        """Raise LoopError from `error` if it is an error of a reducer that can be explained."""
        if isinstance(error, DdpilotError):
            return
        if _UNFINISHED in str(error):
            self.check()
        translated = self._translate(str(error))
        if translated is not None:
            raise translated from error

    def _left_out(
        self, error: RuntimeError, model: DistributedDataParallel, parameters: dict[str, nn.Parameter]
    ) -> LoopError:
        found, names = _MISSING.search(str(error)), list(parameters)
        missing = [names[int(number)] for number in re.findall(r"\d+", found[1])] if found else []
        frozen = [name for name in missing if not parameters[name].requires_grad]
        return LoopError(
            "synchronising gradients",
            found=f"on this rank the backward pass left out {_name_parameters(missing)} of {class_name(model)}; "
            "a rank that used it waits for this one",
            fix=_fix(model, frozen),
        )

    def _translate(self, text: str) -> LoopError | None:
        if _CHANGED in text:
            found = "this update uses a parameter that the first one did not, and `static_graph` is True"
            return self._error(found, "Use find_unused_parameters=True instead of static_graph=True.")
        if _TWICE in text:
            number = _AT_INDEX.search(text)
            at = int(number[1]) if number else 0
            names = {list(one.reduced)[at] for one in self._prepared.models if at < len(one.reduced)}
            which = " or ".join(sorted(names)) or "a parameter"
            hidden = _HIDDEN if any(model.find_unused_parameters for model in self._prepared.ddp_models) else ""
            return self._error(
                f"{which} got its gradient twice in one backward pass",
                f"{hidden}Use torch.utils.checkpoint with use_reentrant=False, or, if every update uses it in the "
                "same way, prepare(..., static_graph=True).",
            )
        return None

    def _error(self, found: str, fix: str) -> LoopError:
        return LoopError("synchronising gradients", found=found, fix=fix)


def is_finished(model: DistributedDataParallel) -> bool:
    """True if DDP waits for no gradient of `model`."""
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _name_parameters(names: list[str]) -> str:
    if not names:
        return "a parameter"
    return f"parameter{'s' if len(names) > 1 else ''} {list_names(names)}"


def _fix(model: DistributedDataParallel, frozen: list[str]) -> str:
    if frozen:
        return f"{frozen[0]} was frozen after prepare(): freeze before it."
    if model.static_graph:
        return "With static_graph=True all updates must use the same ones: use find_unused_parameters=True instead."
    if model.find_unused_parameters:
        return _HIDDEN.rstrip()
    return (
        "If a branch leaves it out in some updates or on some ranks: prepare(..., find_unused_parameters=True), or "
        "DDP_FIND_UNUSED_PARAMETERS=1. If it is never used: requires_grad_(False) before prepare()."
    )
