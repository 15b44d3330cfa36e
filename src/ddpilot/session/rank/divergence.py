# SPDX-License-Identifier: Apache-2.0
"""DDP models of the namespace whose parameters are not the same on all ranks: by the variable's name, and how far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpilot.findings.words import render_ranks
from ddpilot.group.models import fingerprint
from ddpilot.group.process_group import Group

Outline = dict[str, tuple[tuple[int, ...], str]]
"""By parameter: its shape, and a digest of its values."""


def describe_divergence(namespace: Mapping[str, Any], group: Group) -> dict[str, str]:
    """By variable that holds a DDP model which differs over ranks: a sentence. Equal on all ranks. Collective.

    Left out is what is no variable, is not one on all ranks, or is of another shape on some.
    """
    models = {name: value.module for name, value in namespace.items() if _is_model(value) and name[0] != "_"}
    mine = {name: _outline(module) for name, module in models.items()}
    by_rank: list[dict[str, Outline]] = group.all_gather_object(mine)
    found: dict[str, str] = {}
    for variable in sorted(set.intersection(*(set(each) for each in by_rank))):
        outlines = [each[variable] for each in by_rank]
        if len({repr([(name, shape) for name, (shape, _) in outline.items()]) for outline in outlines}) > 1:
            continue
        differing = [name for name in outlines[0] if len({outline[name] for outline in outlines}) > 1]
        if differing:
            first, sides = differing[0], _sides([outline[differing[0]][1] for outline in outlines])
            far = _distance(models[variable].get_parameter(first).detach(), group)
            found[variable] = (
                f"`{variable}` ({type(models[variable]).__name__}) differs in {len(differing)} of {len(outlines[0])} "
                f"parameters, first in `{first}`: {sides}, by up to {far:.3g}"
            )
    return found


def _is_model(value: object) -> bool:
    return DistributedDataParallel in type(value).__mro__


def _outline(module: torch.nn.Module) -> Outline:
    digests = fingerprint(module)
    return {name: (tuple(each.shape), digests[name]) for name, each in module.named_parameters()}


def _sides(digests: Sequence[str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        sides.setdefault(digest, []).append(rank)
    return " against ".join(render_ranks(ranks) for ranks in sides.values())


def _distance(parameter: torch.Tensor, group: Group) -> float:
    """The largest difference of any value to rank 0's, over all ranks; NaN where there is one. Collective."""
    own = parameter.cpu().to(torch.complex128 if parameter.is_complex() else torch.float64)
    of_rank_zero = group.broadcast_object(own)
    distances: list[float] = group.all_gather_object(float((own - of_rank_zero).abs().max()))
    return float(torch.tensor(distances).max())
