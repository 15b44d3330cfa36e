# SPDX-License-Identifier: Apache-2.0
"""Several losses of one forward pass with their own counts, and the weights that make DDP's mean the global mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ddpilot.group.protocol import GroupLike

NUM_COUNTS = 8
"""Counts that are sent with the names, padded to this number, so that ranks with different losses send equal sizes."""
_NAME_VALUES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """One loss of the mapping passed to `Loop.backward`."""

    name: str
    """Its name in the mapping."""
    value: torch.Tensor
    """This rank's mean, shape ()."""
    count: float | None
    """Number of items that the mean is over on this rank; None: samples."""


def read_losses(losses: Mapping[Any, Any]) -> tuple[NamedLoss, ...]:
    """Return the losses of a mapping from a name to a mean, or to (mean, count). Values are not checked."""
    pairs = {name: one if isinstance(one, tuple) and len(one) == 2 else (one, None) for name, one in losses.items()}
    return tuple(NamedLoss(name=str(name), value=mean, count=count) for name, (mean, count) in pairs.items())


def add_losses(losses: Any) -> Any:
    """Return the sum of the means of a mapping, without counts; anything else unchanged."""
    return sum(one.value for one in read_losses(losses)) if isinstance(losses, Mapping) else losses


def encode(losses: Sequence[NamedLoss], counts: Sequence[float]) -> list[float]:
    """Return the values that the ranks sum: the first of `counts`, padded, and a hash that reveals different losses.

    Always NUM_COUNTS + 2 values. The rest of the counts is summed once `decode` shows that the losses are the same.
    """
    text = "\n".join(f"{one.name}{' counted' * (one.count is not None)}" for one in losses)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % _NAME_VALUES
    first = counts[:NUM_COUNTS]
    return [float(number), float(number**2), *first, *[0.0] * (NUM_COUNTS - len(first))]


def decode(sums: Sequence[float], world_size: int) -> tuple[float, ...] | None:
    """Return the first counts over all ranks, padded, or None for different losses. The same on every rank."""
    names, squares, *counts = sums
    return tuple(counts) if names * names == world_size * squares else None


class Objective:
    """The loss of an update over all ranks, for closures and ReduceLROnPlateau."""

    def __init__(self, group: GroupLike) -> None:
        self._group = group
        self._parts: list[tuple[torch.Tensor, float]] = []
        self._is_over = False

    @property
    def is_known(self) -> bool:
        """True if a backward pass has run."""
        return bool(self._parts)

    def begin(self) -> None:
        """Forget the backward passes so far."""
        self._parts.clear()
        self._is_over = False

    def end(self) -> None:
        """Mark the end of an update: the next backward pass begins a new one."""
        self._is_over = True

    def add(self, loss: torch.Tensor, share: float, correction: float = 1.0) -> None:
        """Add a backward pass of `loss`, this rank's mean; `share` is its weight in the mean over all ranks.

        `correction`: factor for all shares of this update, including this one.
        """
        if self._is_over:
            self.begin()
        self._parts.append((loss.detach(), share))
        if correction != 1.0:
            self._parts = [(one, old * correction) for one, old in self._parts]

    def reduce(self) -> torch.Tensor:
        """Return the sum over all ranks, shape (), the same on every rank; float64, float32 on MPS. Collective."""
        wide = torch.float32 if self._group.device.type == "mps" else torch.float64
        total = torch.zeros((), dtype=wide, device=self._group.device)
        for loss, share in self._parts:
            if share:  # an empty mean may be NaN
                total += loss.to(wide) * share
        return self._group.all_reduce(total) if self._group.world_size > 1 else total


@contextmanager
def silencing(idle: Iterable[torch.Tensor], live: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make the gradients of the `idle` losses exact zeros in a backward pass of all losses, whatever their values.

    For empty means, whose gradient may be NaN, as is zero times NaN. The backward pass still runs through their graph,
    since DDP waits for the parameters; gradients from other ranks' losses to gathered rows (`gather_batch`) are kept.
    """
    through = list(walk(idle))
    shared = {*walk(live), *_follow([node for node in through if _is_gather(node)])}
    own = [node for node in through if node not in shared and not hasattr(node, "variable")]
    hooks = [node.register_hook(_zeros) for node in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def has_gather(losses: Iterable[torch.Tensor]) -> bool:
    """True if the backward pass of `losses` runs through rows of all ranks (`gather_batch`)."""
    return any(map(_is_gather, walk(losses)))


def _is_gather(node: Any) -> bool:
    return type(node).__name__ == "_GatherRowsBackward"


def _zeros(inputs: tuple[torch.Tensor | None, ...], _outputs: object) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in inputs)


def walk(losses: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the autograd graph of `losses` once."""
    yield from _follow([loss.grad_fn for loss in losses if loss.grad_fn is not None])


def _follow(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield `nodes` and every node that their backward passes reach, once."""
    waiting = list(seen := set(nodes))
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def backward_weighted(
    losses: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | float] | None,
    models: Iterable[torch.nn.Module],
    *,
    retain_graph: bool = False,
) -> None:
    """Accumulate the gradients of `losses` (scalars), each multiplied by its seed; without `seeds` add exact zeros.

    DDP waits for every rank, so a rank without samples runs backward through its graph too; but the mean of no samples
    is NaN, and so is zero times NaN. `models`: all models that the graph may reach, used only without `seeds`.
    """
    if seeds is not None:
        given = [_seed_tensor(loss, seed) for loss, seed in zip(losses, seeds, strict=True)]
        torch.autograd.backward(losses, given, retain_graph=retain_graph)
        return
    # Hooks of leaf tensors run before a gradient is accumulated and before DDP gets it.
    trained = (parameter for model in models for parameter in model.parameters() if parameter.requires_grad)
    hooks = [parameter.register_hook(_zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(losses, [torch.zeros_like(loss) for loss in losses], retain_graph=retain_graph)
    finally:
        for hook in hooks:
            hook.remove()


def _seed_tensor(loss: torch.Tensor, seed: torch.Tensor | float) -> torch.Tensor | None:
    if isinstance(seed, torch.Tensor):
        return seed
    # None is torch's default, which costs less than a tensor of 1.
    return None if seed == 1.0 else torch.full_like(loss, seed, requires_grad=False)


def _zeros_like(gradient: torch.Tensor | None) -> torch.Tensor | None:
    # With find_unused_parameters, DDP passes None for an output that the loss does not use.
    return None if gradient is None else torch.zeros_like(gradient)


class CountTotals:
    """Totals of counts that are known only batch by batch (tokens), over one accumulation group of one model.

    The first batch's total times the number of batches estimates the group's; once the last one is known, the
    accumulated gradients are multiplied by `correction`.
    """

    def __init__(self, first_total: float, group_size: int) -> None:
        self.reference = max(first_total, 1.0) * group_size
        self._total = 0.0

    def add(self, global_count: float) -> None:
        """Add a batch, with its count over all ranks."""
        self._total += global_count

    @property
    def correction(self) -> float:
        """Factor for the accumulated gradients after the group's last batch; 0 if the total count is 0."""
        return self.reference / self._total if self._total else 0.0
