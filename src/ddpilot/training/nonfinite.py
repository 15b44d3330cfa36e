# SPDX-License-Identifier: Apache-2.0
"""Losses that are NaN or infinite: noticed on the rank where they are, told to all with what was in the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ddpilot.errors import NonFiniteError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.grouping import CurrentBatch
from ddpilot.training.wrapping import unwrap

_NUM_NAMED = 8


@dataclass(frozen=True, eq=False)
class _Seen:
    loss: torch.Tensor
    batch: CurrentBatch | None


class LossWatch:
    """Remembers losses and says which were not finite.

    On the CPU at once. On an accelerator one update later: to look at a loss that is still being computed would make
    the host wait for the device in every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = device.type != "cpu"
        self._new: list[_Seen] = []
        self._old: list[_Seen] = []
        self.bad: list[str] = []
        """A sentence for every loss that was not finite."""

    def look(self, loss: torch.Tensor, batch: CurrentBatch | None) -> None:
        """Remember the loss of one backward."""
        self._new.append(_Seen(loss.detach(), batch))

    def take(self) -> bool:
        """Was a loss not finite, of those whose turn it is? To be asked once per update."""
        due, self._old, self._new = (self._old, self._new, []) if self._is_late else (self._new, [], [])
        self.bad += [_describe(seen) for seen in due if not bool(torch.isfinite(seen.loss).all())]
        return bool(self.bad)


def _describe(seen: _Seen) -> str:
    value = seen.loss.float().sum().item()
    if seen.batch is None:
        return f"the loss is {value}"
    ids = [int(number) for number in seen.batch.sample_ids[:_NUM_NAMED]]
    more = "" if seen.batch.count <= _NUM_NAMED else f" and {seen.batch.count - _NUM_NAMED} more"
    named = ", ".join(map(str, ids))
    return f"the loss is {value} in epoch {seen.batch.epoch}, batch {seen.batch.index}, of samples {named}{more}"


def describe_parameters(models: Iterable[nn.Module]) -> str:
    """Which weights and which gradients are not finite, by name, at most eight of each."""
    named = [(name, p) for model in models for name, p in unwrap(model).named_parameters()]
    weights = [name for name, p in named if not bool(torch.isfinite(p).all())]
    gradients = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    return f"weights that are not finite: {_names(weights)}; gradients: {_names(gradients)}"


def _names(names: list[str]) -> str:
    more = "" if len(names) <= _NUM_NAMED else f" and {len(names) - _NUM_NAMED} more"
    return (", ".join(names[:_NUM_NAMED]) or "none") + more


def raise_nonfinite(group: GroupLike, watch: LossWatch, models: Iterable[nn.Module]) -> None:
    """Raise NonFiniteError on every rank, with what each rank saw. Collective: to be called once all ranks know."""
    mine = f"{'; '.join(watch.bad)}; {describe_parameters(models)}" if watch.bad else ""
    said = group.all_gather_object(mine) if group.world_size > 1 else [mine]
    watch.bad = []
    by_rank = [(rank, text) for rank, text in enumerate(said) if text]
    raise NonFiniteError(
        "computing the loss",
        found="; ".join(f"on rank {rank} {text}" for rank, text in by_rank),
        fix="Look at those samples first. Weights that are not finite point to an earlier step: a smaller learning "
        "rate, or clip_grad_norm_(); finite weights point to data or loss. Loop(check_finite=False) goes on.",
        rank=by_rank[0][0],
    )
