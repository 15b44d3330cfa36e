# SPDX-License-Identifier: Apache-2.0
"""Find live DDP models, bind them to a new process group in place, and compare their parameters across ranks."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

from ddpilot.group.process_group import Group

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The constants of splitmix64, as int64."""

_CHUNK_WORDS = 1 << 22


def find_models() -> list[DistributedDataParallel]:
    """All DDP models that are alive in this process, in no particular order."""
    if not _look_for_models():
        return []
    gc.collect()  # drop models that are only kept by reference cycles; collecting is slow, so only if there are models
    return _look_for_models()


def _look_for_models() -> list[DistributedDataParallel]:
    # `isinstance` would make a lazy object load what it stands for, and is slow for abstract base classes.
    return [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]


def bind_model(model: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    """Bind `model` to `group`, torch's default group, in place; its parameters and optimizer are kept.

    Returns False, and changes nothing, if the model's group had a different size: only the code that created that group
    knows which ranks the new one needs. Not collective.
    """
    old = model.process_group
    if old.size() != group.size():
        return False
    for module in model.modules():
        if getattr(module, "process_group", None) is old:
            module.__dict__["process_group"] = group
    # Pickling drops a model's group and unpickling assigns the default one, which also creates a new reducer.
    model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
    for hook, state in model._comm_hooks:
        _register_comm_hook(model.reducer, state, hook)
    return True


def fingerprint(model: torch.nn.Module) -> dict[str, str]:
    """Parameter name -> digest of its exact bytes and dtype. Buffers are excluded: they may differ by design.

    Parameters on a device are reduced there; only one number per parameter is copied.
    """
    return {
        name: _digest(parameter) if parameter.device.type == "cpu" else f"{int(_mix(parameter)):x} {parameter.dtype}"
        for name, parameter in model.named_parameters()
    }


def compare_models(models: Sequence[DistributedDataParallel], group: Group) -> tuple[str, ...]:
    """One sentence for every parameter (and for every model) that differs across ranks. Collective.

    Ranks find their models in any order, so models are matched by class, parameter names and shapes.
    """
    mine = sorted(((_outline(model.module), fingerprint(model.module)) for model in models), key=repr)
    all_ranks: list[list[tuple[str, dict[str, str]]]] = group.all_gather_object(mine)
    if len({len(theirs) for theirs in all_ranks}) > 1:
        counts = ", ".join(f"{len(theirs)} on rank {rank}" for rank, theirs in enumerate(all_ranks))
        return (f"the ranks have different numbers of DDP models: {counts}",)
    found: list[str] = []
    for position in range(len(mine)):
        found += _differences([theirs[position] for theirs in all_ranks])
    return tuple(found)


def _differences(by_rank: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    outlines = _ranks_by(outline for outline, _ in by_rank)
    if len(outlines) > 1:
        each = "; ".join(f"{outline[:200]} on ranks {', '.join(map(str, r))}" for outline, r in outlines.items())
        return [f"the ranks have different models: {each}"]
    outline, first = by_rank[0]
    found = []
    for name in first:
        digests = _ranks_by(parameters[name] for _, parameters in by_rank)
        if len(digests) > 1:
            sides = " against ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in digests.values())
            found.append(f"parameter {name} of {outline.partition('(')[0]} differs: {sides}")
    return found


def _ranks_by(values: Iterable[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _outline(module: torch.nn.Module) -> str:
    names = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}({names})"


def _mix(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number (int64 scalar on the tensor's device) computed from the tensor's exact bytes and their order.

    It is the sum over elements of a mix (splitmix64) of the word and its position: a plain sum would miss swapped
    elements.
    """
    words = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[min(tensor.element_size(), 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS].to(torch.int64, copy=True)
        part += torch.arange(start, start + part.numel(), device=part.device) * _MIX[0]
        for factor, shift in zip(_MIX[1:], (30, 27), strict=True):
            part = (part ^ (part >> shift)) * factor
        total += (part ^ (part >> 31)).sum()
    return total


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    data = values.view(torch.uint8).numpy().data if values.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest() + f" {tensor.dtype}"
