# SPDX-License-Identifier: Apache-2.0
"""Find DDP models whose parameters differ between ranks: the variable that holds them, and the largest difference."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ddpilot.findings.text import render_ranks
from ddpilot.group.ddp_models import find_models, fingerprint
from ddpilot.group.process_group import Group

_HOLDERS = (
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
)

NOWHERE = " in no variable"
_MAX_PARTS = 100

Outline = dict[str, tuple[tuple[int, ...], str]]
"""By parameter: its shape and a digest of its values."""


def find_lost(namespace: Mapping[str, Any]) -> list[str]:
    """Return the kinds of objects in this process that are lost with its groups, and the variables that hold one."""
    found = ["groups of `new_group`"] if len(c10d._world.pg_map) > 1 else []
    kinds = {name: getattr(sys.modules[module], name, None) for module, name in _HOLDERS if module in sys.modules}
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    if not kinds:
        return found
    seen = {name for each in gc.get_objects() for name, kind in kinds.items() if kind in type(each).__mro__}
    return found + [name + _in_variables(kinds[name], namespace) for name in sorted(seen)]


def _in_variables(kind: Any, namespace: Mapping[str, Any]) -> str:
    names = [name for name, value in namespace.items() if name[0] != "_" and kind in type(value).__mro__]
    return f" ({', '.join(f'`{name}`' for name in names)})" if names else ""


def describe_divergence(namespace: Mapping[str, Any], group: Group) -> dict[str, str]:
    """Describe the DDP models that differ between ranks, by expression for the model. Same result on all ranks.

    Collective. A model that no variable holds, directly or inside another value, is named "a model of class Net in no
    variable". Models that are missing on some ranks, or have other shapes there, are left out.
    """
    models = _find_models(namespace)
    mine = {name: _outline(module) for name, module in models.items()}
    by_rank: list[dict[str, Outline]] = group.all_gather_object(mine)
    found: dict[str, str] = {}
    for name in sorted(set.intersection(*(set(each) for each in by_rank))):
        outlines = [each[name] for each in by_rank]
        if len({repr([(parameter, shape) for parameter, (shape, _) in each.items()]) for each in outlines}) > 1:
            continue
        differing = [parameter for parameter in outlines[0] if len({each[parameter] for each in outlines}) > 1]
        if differing:
            first, sides = differing[0], _sides([outline[differing[0]][1] for outline in outlines])
            far = _distance(models[name].get_parameter(first).detach(), group)
            what = name if name.endswith(NOWHERE) else f"`{name}` ({type(models[name]).__name__})"
            found[name] = (
                f"{what} differs in {len(differing)} of {len(outlines[0])} "
                f"parameters, first in `{first}`: {sides}, by up to {far:.3g}"
            )
    return found


def _find_models(namespace: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Return the modules wrapped by DDP, each once, by an expression for the model.

    Models that no variable holds are included only if no two of them have the same class.
    """
    found: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    variables = {name: value for name, value in namespace.items() if name[0] != "_"}
    inside = {path: part for name, value in variables.items() for path, part in _parts(name, value)}
    for path, value in (*variables.items(), *inside.items()):
        if DistributedDataParallel in type(value).__mro__ and id(value) not in seen:
            seen.add(id(value))
            found[path] = value.module
    others = [model.module for model in find_models() if id(model) not in seen]
    names = Counter(type(module).__name__ for module in others)
    alone = (module for module in others if names[type(module).__name__] == 1)
    return found | {f"a model of class {type(module).__name__}{NOWHERE}": module for module in alone}


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a variable holds: entries of a dictionary or sequence, attributes of an object."""
    kinds = type(value).__mro__  # `isinstance` would load what a lazy object stands for
    if dict in kinds:
        keys = [key for key in itertools.islice(value, _MAX_PARTS) if isinstance(key, (str, int))]
        yield from ((f"{name}[{key!r}]", value[key]) for key in keys)
    elif list in kinds or tuple in kinds:
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value[:_MAX_PARTS]))
    elif type not in kinds and ModuleType not in kinds:
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        yield from ((f"{name}.{attribute}", part) for attribute, part in attributes.items())


def _outline(module: torch.nn.Module) -> Outline:
    digests = fingerprint(module)
    return {name: (tuple(each.shape), digests[name]) for name, each in module.named_parameters()}


def _sides(digests: Sequence[str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        sides.setdefault(digest, []).append(rank)
    return " against ".join(render_ranks(ranks) for ranks in sides.values())


def _distance(parameter: torch.Tensor, group: Group) -> float:
    """Return the largest absolute difference of any value from rank 0's, over all ranks; NaN if a value is.

    Collective.
    """
    own = parameter.cpu()
    of_rank_zero = group.broadcast_object(own)
    exact = torch.complex128 if own.is_complex() else torch.float64
    distances: list[float] = group.all_gather_object(float((own.to(exact) - of_rank_zero.to(exact)).abs().max()))
    return float(torch.tensor(distances).max())
