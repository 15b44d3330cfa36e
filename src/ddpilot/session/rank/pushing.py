# SPDX-License-Identifier: Apache-2.0
"""Values from the notebook on their way into a rank's namespace: those that were named are set, and no others."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

_DEFINITIONS = (types.FunctionType, type, types.ModuleType)
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
_MAX_DEPTH = 10


class Pushed:
    """Sets variables of `namespace`. `own`: the session's names, which no push replaces.

    A function from the notebook has the rank's variables for globals. What it refers to comes with it: that is set
    where the rank has no such variable, or has it from an earlier push and as it was then; the rank's own are kept.
    """

    def __init__(self, namespace: dict[str, Any], own: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._own = own
        self._brought: dict[str, Any] = {}
        """By name: what came with an earlier push without being named, and definitions that were named."""

        self._told: set[str] = set()
        """Names of which it was said that the rank's own is kept."""

    def put(
        self, values: Mapping[str, Any], definitions: Mapping[str, Any], uses: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Set `values`; what they use: `definitions` and `uses`, by name. Returns what there is to say, or None.

        "kept": names of variables that the rank keeps, though the notebook has other values for what is pushed;
        "stale": by name of a variable that was replaced: names of variables that still work on what it was.
        """
        replaced = {name: self._namespace[name] for name in values if name in self._namespace}
        self._namespace.update(values)
        self._brought.update({name: value for name, value in values.items() if isinstance(value, _DEFINITIONS)})
        others = {name: value for name, value in uses.items() if name not in values}
        kept = [name for name in self.bind(others) if name not in self._told and name not in self._own]
        self.bind({name: value for name, value in definitions.items() if name not in (*values, *others)})
        self._told.update(kept)
        stale = find_stale(self._namespace, {name: was for name, was in replaced.items() if was is not values[name]})
        return {"kept": sorted(kept), "stale": stale} if kept or stale else None

    def bind(self, values: Mapping[str, Any]) -> list[str]:
        """Set what the rank lacks, or has as an earlier push left it; the names of others that differ from `values`."""
        kept = []
        for name, value in values.items():
            if name in self._own:
                self._namespace.setdefault(name, self._own[name])
            elif name not in self._namespace or self._is_as_brought(name):
                self._namespace[name] = self._brought[name] = value
            elif not _are_alike(self._namespace[name], value):
                kept.append(name)
        return kept

    def _is_as_brought(self, name: str) -> bool:
        """True if the rank cannot have changed it since. A model, a list or an object may have been worked on."""
        value = self._namespace[name]
        is_same = name in self._brought and self._brought[name] is value
        return is_same and isinstance(value, (*_DEFINITIONS, *_PLAIN))


def find_stale(namespace: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, list[str]]:
    """By name of a model in `replaced`: variables whose parameters are those that it had."""
    parameters = {name: ids for name, was in replaced.items() if (ids := _parameter_ids(was))}
    if not parameters:
        return {}
    others = {name: ids for name, value in namespace.items() if name[0] != "_" and (ids := _parameter_ids(value))}
    found = {name: [other for other, ids in others.items() if ids & own] for name, own in parameters.items()}
    return {name: names for name, names in found.items() if names}


def _parameter_ids(value: object) -> set[int]:
    kinds = type(value).__mro__  # `isinstance` would ask a lazy object for what it stands for
    if torch.nn.Module in kinds:
        return {id(parameter) for parameter in value.parameters()}  # type: ignore[attr-defined]
    if torch.optim.Optimizer in kinds:
        return {id(each) for group in value.param_groups for each in group["params"]}  # type: ignore[attr-defined]
    return set()


def prefer_own(own: Mapping[str, Any], uses: Mapping[str, Any]) -> dict[str, Any]:
    """The session's names that stand for the same in the notebook, such as a `rank = 0` of a one-process version."""
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
    """True if `==` compares all of it and runs no code of the user's."""
    if depth > _MAX_DEPTH:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(each, depth + 1) for each in value)
    if type(value) is dict:
        return all(_is_plain(key, depth + 1) and _is_plain(each, depth + 1) for key, each in value.items())
    return type(value) in _PLAIN
