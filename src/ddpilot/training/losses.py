# SPDX-License-Identifier: Apache-2.0
"""Several losses of one forward pass, each a mean over something else, in one backward pass."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_COUNTS = 8
"""Counts travel in multiples of this number, so that ranks with different losses send messages of one size."""
_NAME_VALUES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """One of the losses of a mapping."""

    name: str
    """Its name in the mapping."""
    value: torch.Tensor
    """This rank's mean, shape ()."""
    count: float | None
    """Number of things that the mean is over on this rank; None: samples."""


def read_losses(losses: Mapping[Any, Any]) -> tuple[NamedLoss, ...]:
    """The losses of a mapping from a name to a mean, or to (mean, count). Nothing is checked."""
    return tuple(NamedLoss(name=str(name), value=_mean(said), count=_count(said)) for name, said in losses.items())


def add_losses(said: Any) -> Any:
    """The sum of the means of a mapping, without counts; anything else as it is."""
    return sum(one.value for one in read_losses(said)) if isinstance(said, Mapping) else said


def _mean(said: Any) -> Any:
    return said[0] if isinstance(said, tuple) and len(said) == 2 else said


def _count(said: Any) -> Any:
    return said[1] if isinstance(said, tuple) and len(said) == 2 else None


def encode(losses: Sequence[NamedLoss], counts: Sequence[float]) -> list[float]:
    """What ranks add up: `counts`, and from which they see whether all have the same losses."""
    said = "\n".join(f"{one.name}{' counted' * (one.count is not None)}" for one in losses)
    number = int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little") % _NAME_VALUES
    num_padded = max(1, math.ceil(len(counts) / NUM_COUNTS)) * NUM_COUNTS - len(counts)
    return [float(number), float(number**2), *counts, *[0.0] * num_padded]


def decode(sums: Sequence[float], world_size: int) -> tuple[float, ...] | None:
    """The counts of all ranks together, padded; None if the ranks have different losses. The same on every rank."""
    names, squares, *counts = sums
    return tuple(counts) if names * names == world_size * squares else None


class _Zeros(torch.autograd.Function):
    """A zero that gives exact zeros to all that it is made of, whatever their values are."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def zeros_for(losses: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A loss that adds exact zeros to every parameter that `losses` depend on; None if there are none.

    For means over nothing: the gradient of one may be NaN, and zero times NaN too.
    """
    reached: dict[int, torch.Tensor] = {}
    for node in walk(losses):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, torch.Tensor) and parameter.requires_grad:
            reached[id(parameter)] = parameter
    if not reached:
        return None
    zero: torch.Tensor = _Zeros.apply(*reached.values())  # type: ignore[no-untyped-call]
    return zero


def walk(losses: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the autograd graph of `losses`, once."""
    waiting = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
