# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks have the same data and model before they train, and synchronize weights and optimizer."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from fastai.torch_core import to_cpu, to_device

from ddpilot.errors import GroupError
from ddpilot.group.ddp_models import fingerprint
from ddpilot.group.process_group import Group


def agree(learn: Any, group: Group) -> None:
    """Check that data and model are equal on all ranks, and send rank 0's weights and optimizer. Collective.

    Weights and optimizer are only sent if they differ: new models, or a fit that failed after some ranks had stepped.
    Raises GroupError if data or the model's shapes differ; otherwise one rank would train on another's validation set.
    """
    facts = {f"data loader {i}": _outline_data(loader) for i, loader in enumerate(learn.dls)}
    facts["model"] = _outline_model(learn.model)
    said: list[dict[str, str]] = group.all_gather_object(facts)
    for name in facts:
        _check(name, [theirs.get(name, "none") for theirs in said], group)
    if len(set(group.all_gather_object((_digest(learn), learn.opt is not None)))) > 1:
        share_tensors(learn.model.state_dict().values(), group)
        _share_optimizer(learn, group)


def share_tensors(tensors: Any, group: Group) -> None:
    """Broadcast rank 0's values to all ranks, in place. Collective."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            whole = tensor.detach().contiguous()
            group.broadcast(whole)
            tensor.detach().copy_(whole)


def _share_optimizer(learn: Any, group: Group) -> None:
    state = group.broadcast_object(None if learn.opt is None else to_cpu(learn.opt.state_dict()))
    if state is None:
        learn.opt = None
    elif learn.opt is not None or group.rank:
        if learn.opt is None:
            learn.create_opt()
        learn.opt.load_state_dict(to_device(state, group.device))


def _check(name: str, said: list[str], group: Group) -> None:
    if len(set(said)) > 1:
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise GroupError(
            "training a Learner on all ranks",
            found=f"its {name} is not the same on all of them ({ranks})",
            fix="Run the cells that make it on all ranks; give a seed to whatever draws its items at random",
            rank=group.rank,
        )


def _outline_data(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", None)
    items: Any = getattr(dataset, "items", None)
    count = len(dataset) if hasattr(dataset, "__len__") else "any number of"
    if hasattr(items, "index") and hasattr(items, "iloc"):  # a table: its rows are identified by their labels
        items = list(items.index)
    try:
        names = [item for item in items or () if isinstance(item, (str, int, float)) or hasattr(item, "__fspath__")]
    except (TypeError, ValueError):  # not a collection, or one of arrays, which have no truth value
        names = []
    digest = hashlib.blake2b("\n".join(map(str, names)).encode(), digest_size=4).hexdigest()
    return f"{count} samples" + (f" ({digest})" if names else "")


def _outline_model(model: torch.nn.Module) -> str:
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).hexdigest()
    return f"{type(model).__name__} with {len(shapes)} tensors ({digest})"


def _digest(learn: Any) -> str:
    parts: list[Any] = [sorted(fingerprint(learn.model).items())]
    parts.append([(name, _sum(buffer)) for name, buffer in learn.model.named_buffers()])
    if learn.opt is not None:
        parts.append(_sums(learn.opt.state_dict()))
    return hashlib.blake2b(repr(parts).encode()).hexdigest()


def _sums(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _sum(value)
    if isinstance(value, dict):
        return [(str(key), _sums(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)) or hasattr(value, "items"):
        return [_sums(part) for part in value]
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _sum(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().sum())
