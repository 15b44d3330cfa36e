# SPDX-License-Identifier: Apache-2.0
"""Find the names that a program uses for the parameters of an optimizer, and for modules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from ddpilot.record.call_sites import local_variables

_MAX_FRAMES = 40
_MAX_VARIABLES = 500


def find_parameter_names(optimizer: Optimizer, frame: FrameType | None) -> dict[int, str]:
    """Return names such as ``head.weight`` by the parameter's id.

    Uses the names that `optimizer` was given, or else those of modules held by variables, and attributes of variables,
    from `frame` outwards. Parameters without a name are left out.
    """
    found: dict[int, str] = {}
    wanted: set[int] = set()
    for group in optimizer.param_groups:
        ids = [id(parameter) for parameter in group["params"]]
        wanted.update(ids)
        found.update(zip(ids, group.get("param_names", ()), strict=False))
    modules = _modules_around(frame)
    while not wanted <= found.keys() and (named := next(modules, None)) is not None:
        name, module = named
        for path, parameter in module.named_parameters():
            if id(parameter) in wanted:
                found.setdefault(id(parameter), f"{name}.{path}")
    return found


def find_module_name(module: nn.Module, frame: FrameType | None) -> str:
    """Return the name of `module` in the variables from `frame` outwards, such as ``model``; "" if it has none."""
    return next((name for name, each in _modules_around(frame) if each is module), "")


def _modules_around(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    outermost = frame
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        outermost = outermost or frame
        yield from _modules_in(local_variables(frame))
        frame = frame.f_back
    if outermost is not None:
        yield from _modules_in(outermost.f_globals)


def _modules_in(variables: Any, prefix: str = "", *, deeper: bool = True) -> Iterator[tuple[str, nn.Module]]:
    # By type, not by isinstance: a proxy object may run code when it is asked for its class.
    found = [(name, value, type(value)) for name, value in islice(list(variables.items()), _MAX_VARIABLES)]
    yield from ((f"{prefix}{name}", value) for name, value, kind in found if issubclass(kind, nn.Module))
    for name, value, kind in found if deeper else ():
        if not issubclass(kind, (nn.Module, ModuleType, type)):
            yield from _modules_in(_attributes_of(value), "" if name == "self" else f"{name}.", deeper=False)


def _attributes_of(value: object) -> dict[str, Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}
