# SPDX-License-Identifier: Apache-2.0
"""Losses of a backward pass, and the weights that make DDP's mean over ranks the mean over all samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import CurrentBatch

NUM_COUNTS = 8
"""Counts that are sent with the names, padded to this number, so that ranks with different losses send equal sizes."""
_NAME_VALUES = 1 << 20


@dataclass(slots=True, kw_only=True)  # a frozen one would take four times as long to create
class NamedLoss:
    """A loss passed to `Loop.backward`."""

    name: str | None
    """Its name in the mapping; None if it was passed alone."""
    value: torch.Tensor
    """This rank's mean, shape ()."""
    count: float | None
    """Number of items that the mean is over on this rank; None: samples."""
    part: int | None = None
    """Index of the loader whose samples the mean is over, for a loss of each of several loaders."""


def read_losses(losses: Any, count: float | None = None) -> tuple[NamedLoss, ...]:
    """Return the losses of a sequence (of several loaders), of a mapping to a mean or (mean, count), or a single one.

    Values are not checked.
    """
    if isinstance(losses, tuple | list):
        return tuple(
            NamedLoss(name=f"loader {part}", value=one, count=None, part=part) for part, one in enumerate(losses)
        )
    if isinstance(losses, torch.Tensor) or not isinstance(losses, Mapping):
        return (NamedLoss(name=None, value=losses, count=count),)
    pairs = {name: one if isinstance(one, tuple) and len(one) == 2 else (one, None) for name, one in losses.items()}
    return tuple(NamedLoss(name=str(name), value=mean, count=number) for name, (mean, number) in pairs.items())


def check_losses(losses: Sequence[NamedLoss]) -> None:
    """Raise LoopError unless all of `losses` are scalars with a gradient."""
    if not losses:
        raise _error("a mapping without losses", 'Pass {"name": loss}, or {"name": (loss, count)}.')
    for one in losses:
        where = "" if one.name is None else f" under {one.name!r}"
        if not isinstance(one.value, torch.Tensor):
            raise _error(f"a {type(one.value).__name__} instead of a loss{where}", "Pass the tensor, not loss.item().")
        if one.value.ndim:
            found = f"a loss of shape {tuple(one.value.shape)}{where}"
            raise _error(found, "Pass its mean over this rank's samples.")
        if not one.value.requires_grad:
            raise _error(
                f"a loss without a gradient{where}, so nothing would be trained",
                "Compute it from the model's output, without detach(), .item() or no_grad().",
            )


def _error(found: str, fix: str) -> LoopError:
    return LoopError("running backward", found=found, fix=fix)


def add_losses(losses: Any) -> Any:
    """Return the sum of the means of a mapping or a sequence, without counts; anything else unchanged."""
    if isinstance(losses, torch.Tensor) or not isinstance(losses, Mapping | tuple | list):
        return losses
    return sum(one.value for one in read_losses(losses))


class LossWeights:
    """The number of items that each loss of a backward pass is a mean over, on this rank and on all ranks.

    DDP averages the gradients of the ranks. So with the weight `local * world_size / total`, each loss contributes its
    gradient in the mean over the items of all ranks. `sum_over_ranks(count, more)` returns the sums over all ranks of
    `count` and of further numbers. Collective.
    """

    def __init__(self, world_size: int, sum_over_ranks: Callable[[float, Sequence[float]], tuple[float, Any]]) -> None:
        self._world_size = world_size
        self._sum_over_ranks = sum_over_ranks
        self._groups: dict[tuple[int, ...], CountTotals] = {}

    def begin_group(self) -> None:
        """Begin an accumulation group."""
        self._groups.clear()

    def count(
        self, losses: Sequence[NamedLoss], batch: CurrentBatch | None, models: Sequence[torch.nn.Module]
    ) -> tuple[list[tuple[float, float]], float]:
        """Return local and total items of each of `losses`, and the factor for the accumulated gradients after them.

        `models`: those of the current `Loop.accumulate`. Collective with a count, and for several losses.
        """
        in_group = 0.0 if batch is None else float(batch.group_count)
        is_accumulated = batch is not None and batch.group_size > 1
        if losses[0].part is not None:
            return _count_parts(losses, batch), 1.0
        if losses[0].name is not None:
            local = [_local_count(one, batch) for one in losses]
            if is_accumulated and any(one.count is not None for one in losses):
                raise _error(
                    "several losses with counts in an accumulation group, whose totals are known too late",
                    "Do not accumulate, or pass each loss as a mean over samples, without a count.",
                )
            totals = iter(self._sum_named(losses, local))
            of_ranks = [in_group if one.count is None else next(totals) for one in losses]
            return list(zip(local, of_ranks, strict=True)), 1.0
        num = _local_count(losses[0], batch)
        if losses[0].count is None:
            return [(num, in_group)], 1.0
        total, _ = self._sum_over_ranks(num, ())
        if batch is None or not is_accumulated:
            return [(num, total)], 1.0
        group = self._group_of(total, batch, models)
        group.add(total)
        return [(num, group.reference)], group.correction if batch.is_last else 1.0

    def _sum_named(self, losses: Sequence[NamedLoss], local: Sequence[float]) -> Sequence[float]:
        own = [num for num, one in zip(local, losses, strict=True) if one.count is not None]
        totals = decode(self._sum_over_ranks(0.0, encode(losses, own))[1], self._world_size)
        if totals is None:
            raise _error(
                f"the ranks have different losses: {', '.join(repr(one.name) for one in losses)} here",
                "Pass the same names on every rank, and a count of 0 for an empty mean: "
                '{"box": (output.sum() * 0, 0)}.',
            )
        rest = own[NUM_COUNTS:]
        return (*totals, *self._sum_over_ranks(0.0, rest)[1]) if rest else totals

    def _group_of(self, total: float, batch: CurrentBatch, models: Sequence[torch.nn.Module]) -> CountTotals:
        key = tuple(map(id, models))
        if not key:
            raise _error(
                "`count=` with accumulation, outside of `accumulate`, so the model is unknown",
                "Run the forward and backward pass in `with loop.accumulate(model):`.",
            )
        if batch.is_first and key in self._groups:
            raise _error(
                "two losses with `count=` for one model in one batch of an accumulation group",
                "Add the losses and call backward() once, or do not accumulate.",
            )
        if batch.is_first:
            self._groups[key] = CountTotals(total, batch.group_size)
        return self._groups[key]


def _count_parts(losses: Sequence[NamedLoss], batch: CurrentBatch | None) -> list[tuple[float, float]]:
    """Return the samples of each loader on this rank, and on all ranks in the accumulation group. Not collective."""
    parts = () if batch is None else batch.parts
    if len(parts) != len(losses):
        num = f"a batch of {len(parts)} loaders" if parts else "a batch of one loader"
        fix = "Pass one loss for each loader of loop.batches(a, b), in its order; or add them, or name them in a dict."
        raise _error(f"{len(losses)} losses in a {type(losses).__name__}, and {num}", fix)
    return [(float(part.count), float(part.group_count)) for part in parts]


def _local_count(loss: NamedLoss, batch: CurrentBatch | None) -> float:
    if loss.count is not None:
        if not 0 <= float(loss.count) < math.inf:
            which = "" if loss.name is None else f" of {loss.name!r}"
            found = f"`count`{which} is {loss.count}"
            raise _error(found, "Pass the number of items in this rank's mean, 0 or more.")
        return float(loss.count)
    if batch is None:
        raise _error(
            "it was called outside `batches`, so the number of samples is unknown",
            "Iterate over loop.batches(loader), or pass `count=`, the samples (or tokens) in this rank's mean.",
        )
    if batch.parts:
        raise _error(
            f"a loss without a count in a batch of {len(batch.parts)} loaders, which are divided differently",
            "Pass one mean for each loader, loop.backward((loss_a, loss_b)); or the count that the mean is over.",
        )
    return float(batch.count)


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
