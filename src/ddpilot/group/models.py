# SPDX-License-Identifier: Apache-2.0
"""Live DDP models: find them, bind them to a new process group in place, compare their parameters over ranks."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

from ddpilot.group.process_group import Group


def find_models() -> list[DistributedDataParallel]:
    """Every DDP model that is alive in this process, in no particular order."""
    if not _look_for_models():
        return []
    gc.collect()  # a model that nothing refers to any more may still be there; collecting is slow, so only then
    return _look_for_models()


def _look_for_models() -> list[DistributedDataParallel]:
    # `isinstance` would ask the class of a lazy object for what it stands for, and an abstract base class is slow.
    return [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]


def bind_model(model: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    """Make `model` use `group`, torch's default group, in place; its parameters and optimizer stay.

    False, and nothing done, where the model was on a smaller group: only the code that made that group can say which
    ranks the new one has. Not collective.
    """
    old = model.process_group
    if old.size() != group.size():
        return False
    for module in model.modules():
        if getattr(module, "process_group", None) is old:
            module.__dict__["process_group"] = group
    # A model pickles without its group and takes the default one back; that also makes a new gradient reducer.
    model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
    for hook, state in model._comm_hooks:
        _register_comm_hook(model.reducer, state, hook)
    return True


def fingerprint(model: torch.nn.Module) -> dict[str, str]:
    """Parameter name -> digest of its exact bytes and dtype. Buffers are left out: they may differ by design."""
    return {name: _digest(parameter) for name, parameter in model.named_parameters()}


def compare_models(models: Sequence[DistributedDataParallel], group: Group) -> tuple[str, ...]:
    """One sentence for every parameter (and for every model) that is not the same on all ranks. Collective.

    Ranks find their models in any order, so models are matched by their class, parameter names and shapes.
    """
    mine = sorted(((_outline(model.module), fingerprint(model.module)) for model in models), key=repr)
    all_ranks: list[list[tuple[str, dict[str, str]]]] = group.all_gather_object(mine)
    if len({len(theirs) for theirs in all_ranks}) > 1:
        said = ", ".join(f"{len(theirs)} on rank {rank}" for rank, theirs in enumerate(all_ranks))
        return (f"the ranks have different numbers of DDP models: {said}",)
    found: list[str] = []
    for position in range(len(mine)):
        found += _differences([theirs[position] for theirs in all_ranks])
    return tuple(found)


def _differences(by_rank: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    outlines = _ranks_by(outline for outline, _ in by_rank)
    if len(outlines) > 1:
        return [f"the ranks have different models: {_said(outlines)}"]
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


def _said(ranks_by_outline: dict[str, list[int]]) -> str:
    return "; ".join(f"{outline[:200]} on ranks {', '.join(map(str, r))}" for outline, r in ranks_by_outline.items())


def _outline(module: torch.nn.Module) -> str:
    names = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}({names})"


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    data = values.view(torch.uint8).numpy().data if values.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest() + f" {tensor.dtype}"
