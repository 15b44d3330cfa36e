# SPDX-License-Identifier: Apache-2.0
"""Variables that the notebook pushes to a rank, and pulls from it, without effect on the rank's other variables."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import ShipError, did_you_mean
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.session.protocol.variables import MISSING, find_incomplete, make_refusal, user_names
from ddpilot.session.rank.session_group import SessionGroup

_DEFINITIONS = (types.FunctionType, type, types.ModuleType)
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
_MAX_DEPTH = 10


class PushedVariables:
    """Sets variables in `namespace`. `own`: the session's names, which a push does not replace.

    A function from the notebook uses the rank's variables as globals. Objects that it refers to are sent with it; they
    are set if the rank has no such variable, or has it unchanged from an earlier push. Other variables of the rank are
    kept.
    """

    def __init__(self, namespace: dict[str, Any], own: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._own = own
        self._pushed_values: dict[str, Any] = {}
        """By name: values set by earlier pushes without being named, and functions, classes and modules that were
        named."""

        self._reported: set[str] = set()
        """Names for which it was already reported that the rank's own value is kept."""

    def put(
        self, values: Mapping[str, Any], definitions: Mapping[str, Any], uses: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Set `values`, and what they use: `definitions` and `uses`, by name. Return what to report, or None.

        "kept": names that keep the rank's value although the notebook's differs; "stale": for each replaced variable,
        the names of variables that still use its previous value.
        """
        replaced = {name: self._namespace[name] for name in values if name in self._namespace}
        self._namespace.update(values)
        self._pushed_values.update({name: value for name, value in values.items() if isinstance(value, _DEFINITIONS)})
        others = {name: value for name, value in uses.items() if name not in values}
        kept = [name for name in self.bind(others) if name not in self._reported and name not in self._own]
        self.bind({name: value for name, value in definitions.items() if name not in (*values, *others)})
        self._reported.update(kept)
        stale = find_stale(self._namespace, {name: was for name, was in replaced.items() if was is not values[name]})
        return {"kept": sorted(kept), "stale": stale} if kept or stale else None

    def bind(self, values: Mapping[str, Any]) -> list[str]:
        """Set names that the rank lacks, or has unchanged from an earlier push.

        Return the others whose values differ.
        """
        kept = []
        for name, value in values.items():
            if name in self._own:
                self._namespace.setdefault(name, self._own[name])
            elif name not in self._namespace or self._is_as_pushed(name):
                self._namespace[name] = self._pushed_values[name] = value
            elif not _are_alike(self._namespace[name], value):
                kept.append(name)
        return kept

    def _is_as_pushed(self, name: str) -> bool:
        """True if the rank cannot have changed the value.

        A model, list or other object may have been modified in place.
        """
        value = self._namespace[name]
        is_same = name in self._pushed_values and self._pushed_values[name] is value
        return is_same and isinstance(value, (*_DEFINITIONS, *_PLAIN))


def find_stale(namespace: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, for each model in `replaced`, the variables that still use its parameters."""
    parameters = {name: ids for name, was in replaced.items() if (ids := _parameter_ids(was))}
    if not parameters:
        return {}
    others = {name: ids for name, value in namespace.items() if name[0] != "_" and (ids := _parameter_ids(value))}
    found = {name: [other for other, ids in others.items() if ids & own] for name, own in parameters.items()}
    return {name: names for name, names in found.items() if names}


def _parameter_ids(value: object) -> set[int]:
    kinds = type(value).__mro__  # `isinstance` would load what a lazy object stands for
    if torch.nn.Module in kinds:
        return {id(parameter) for parameter in value.parameters()}  # type: ignore[attr-defined]
    if torch.optim.Optimizer in kinds:
        return {id(each) for group in value.param_groups for each in group["params"]}  # type: ignore[attr-defined]
    return set()


def prefer_own(own: Mapping[str, Any], uses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session's names that mean the same in the notebook, such as a `rank = 0` for a single process."""
    alike: dict[str, type | tuple[type, ...]] = {"rank": int, "world_size": int, "device": (str, torch.device)}
    return {name: own[name] for name, kinds in alike.items() if isinstance(uses.get(name), kinds)}


def _are_alike(own: object, other: object) -> bool:
    if own is other:
        return True
    if type(own) is not type(other):
        return False
    if isinstance(own, types.FunctionType) and isinstance(other, types.FunctionType):
        return own.__code__ == other.__code__
    return _is_plain(own) and _is_plain(other) and own == other


def _is_plain(value: Any, depth: int = 0) -> bool:
    """True if `==` compares the value completely and runs no user code."""
    if depth > _MAX_DEPTH:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(each, depth + 1) for each in value)
    if type(value) is dict:
        return all(_is_plain(key, depth + 1) and _is_plain(each, depth + 1) for key, each in value.items())
    return type(value) in _PLAIN


def pack_pulled(expressions: Sequence[str], names: dict[str, Any]) -> tuple[int | None, dict[str, str] | None]:
    """Return a parcel (a file descriptor) with the values of `expressions`, and None; or None and a refusal.

    Objects shared by several values, such as parameters of a model and its optimizer, are also shared in the parent.
    Exceptions raised by an expression propagate.
    """
    values: dict[str, Any] = {}
    for expression in expressions:
        value, refusal = _evaluate(expression, names)
        if refusal is not None:
            return None, {**refusal, "expression": expression}
        values[expression] = value
    if (incomplete := find_incomplete(values)) is not None:
        fix = f"Pull both at once, as in `%ddp pull {incomplete.kind} {incomplete.name}`, or its `state_dict()`"
        return None, {**make_refusal(incomplete.found.format(verb="pulled"), fix), "expression": incomplete.name}
    try:
        parcel, _ = ship("ddpilot-pull", values, [values[each] for each in expressions], did="", known=[])
    except ShipError as error:
        return None, make_refusal(error.found, error.fix, path=error.path)
    return parcel, None


def _evaluate(expression: str, names: dict[str, Any]) -> tuple[Any, dict[str, str] | None]:
    """Return the value of the expression and None, or None and a refusal."""
    if expression.isidentifier() and expression not in names:
        return None, make_refusal(MISSING, did_you_mean(expression, user_names(names), num=3))
    try:
        value = eval(expression, names)
    except NameError as error:
        return None, make_refusal(str(error))
    except AttributeError as error:
        model: Any = error.obj
        if DistributedDataParallel not in type(model).__mro__:
            raise
        is_inside = hasattr(model.module, error.name or "")
        fix = f"The wrapped model has it: write `.module.{error.name}` in place of `.{error.name}`" if is_inside else ""
        return None, make_refusal(str(error), fix)
    if isinstance(value, SessionGroup):
        return None, make_refusal(
            "it belongs to the session and cannot be pulled", "Pull a value of it, such as `group.rank`"
        )
    if isinstance(value, DistributedDataParallel):
        return None, make_refusal(
            "it is a DDP model, and its process group cannot leave its rank",
            f"Pull the module in it, `{expression}.module`, or its weights, `{expression}.module.state_dict()`",
        )
    return value, None
