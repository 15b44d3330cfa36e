# SPDX-License-Identifier: Apache-2.0
"""Weights of local mean losses, so that DDP's mean over ranks is the mean over all samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


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
        # None is torch's default, which costs less than a tensor.
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
