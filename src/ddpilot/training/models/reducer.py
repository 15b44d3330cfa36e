# SPDX-License-Identifier: Apache-2.0
"""Explains errors of DDP's reducer, such as unused parameters, with the names of the parameters."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import DdpilotError, LoopError
from ddpilot.training.models.ddp import class_name

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"
_TWICE = "Expected to mark a variable ready only once"
_MISSING = re.compile(r"did not receive grad for rank \d+: ([\d ,]+)")
_AT_INDEX = re.compile(r"Parameter at index (\d+)")
_SHOWN = 5
_HIDDEN = (
    "With find_unused_parameters=True all that the loss depends on has to be in the model's output: return tensors, in "
    "tuples, lists, dicts or dataclasses. "
)


class ReducerErrors:
    """The DDP models of a loop, with the names of the parameters that their reducers wait for."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._models: list[tuple[DistributedDataParallel, dict[str, nn.Parameter]]] = []
        self._unordered: list[DistributedDataParallel] = []

    def watch(self, model: nn.Module) -> None:
        """Watch `model`, which was just constructed: its reducer expects the parameters that require a gradient now.

        Does nothing for a model that is not in DDP.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        # If a module is prepared again, only the new reducer waits for its gradients.
        self._models = [(known, of) for known, of in self._models if known.module is not model.module]
        self._models.append((model, reduced(model)))
        self._unordered = [known for known in self._unordered if known.module is not model.module]
        if model.static_graph or not model.find_unused_parameters:
            self._unordered.append(model)

    def order_buckets(self) -> None:
        """Rebuild the buckets of each new model once, in an order that its ranks agree on. Collective then.

        Call it after a backward pass. DDP would rebuild them in the next forward pass with gradients: a rank that runs
        an extra forward pass would wait there for the other ranks.
        """
        for model in tuple(self._unordered):
            if not is_finished(model):  # this backward pass covered only a part
                continue
            if not model._has_rebuilt_buckets:
                model._has_rebuilt_buckets = model.reducer._rebuild_buckets()
            if model._has_rebuilt_buckets:
                self._unordered.remove(model)

    def check(self) -> None:
        """Raise LoopError if a backward pass left a parameter out, so that other ranks still wait. Not collective."""
        for model, parameters in self._models:
            try:
                model._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise self._left_out(error, model, parameters) from error

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
            found=f"on this rank the backward pass left out {_say(missing)} of {class_name(model)}; a rank "
            "that used it waits for this one",
            fix=_fix(model, frozen),
            rank=self._rank,
        )

    def _translate(self, text: str) -> LoopError | None:
        if _CHANGED in text:
            found = "this update uses a parameter that the first one did not, and `static_graph` is True"
            return self._error(found, "Use find_unused_parameters=True in place of static_graph=True.")
        if _TWICE in text:
            number = _AT_INDEX.search(text)
            at = int(number[1]) if number else 0
            names = {list(parameters)[at] for _, parameters in self._models if at < len(parameters)}
            which = " or ".join(sorted(names)) or "a parameter"
            hidden = _HIDDEN if any(model.find_unused_parameters for model, _ in self._models) else ""
            return self._error(
                f"{which} got its gradient twice in one backward pass",
                f"{hidden}Use torch.utils.checkpoint with use_reentrant=False, or, where every update uses it in the "
                "same way, prepare(..., static_graph=True).",
            )
        return None

    def _error(self, found: str, fix: str) -> LoopError:
        return LoopError("synchronising gradients", found=found, fix=fix, rank=self._rank)


def is_finished(model: DistributedDataParallel) -> bool:
    """True if DDP waits for no gradient of `model`."""
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def reduced(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that the reducer of a new `model` waits for, by name, in the reducer's order."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }


def _say(names: list[str]) -> str:
    if not names:
        return "a parameter"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"


def _fix(model: DistributedDataParallel, frozen: list[str]) -> str:
    if frozen:
        return f"{frozen[0]} was frozen after prepare(): freeze before it."
    if model.static_graph:
        return "With static_graph=True each update has to use the same: use find_unused_parameters=True in its place."
    if model.find_unused_parameters:
        return _HIDDEN.rstrip()
    return (
        "Where a branch leaves it out now and then, or on some ranks: prepare(..., find_unused_parameters=True), or "
        "DDP_FIND_UNUSED_PARAMETERS=1. Where it is never used: requires_grad_(False) before prepare()."
    )
