# SPDX-License-Identifier: Apache-2.0
"""Explains errors of DDP's reducer, such as unused parameters, with the names of the parameters."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.checkpoint.weights import class_name
from ddpilot.errors import DdpilotError, LoopError, list_names
from ddpilot.training.models.registry import PreparedObjects

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
