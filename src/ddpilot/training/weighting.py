# SPDX-License-Identifier: Apache-2.0
"""What a rank's mean loss has to be multiplied by, so that DDP's mean over ranks is the mean over all samples."""

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
    """Add the gradients of `losses` (scalars), each times its seed; without `seeds` add exact zeros.

    DDP waits for every rank, so a rank without samples runs through its graph too; but the mean of no samples is NaN,
    and so is zero times NaN. `models`: all that the graph may reach, only needed for that.
    """
    if seeds is not None:
        # None is what torch begins with by itself, at less cost than a tensor.
        given = [_seed_tensor(loss, seed) for loss, seed in zip(losses, seeds, strict=True)]
        torch.autograd.backward(losses, given, retain_graph=retain_graph)
        return
    # Leaf hooks run before a gradient is accumulated and before DDP sees it.
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
    # DDP passes None on for an output that the loss does not use, if it looks for unused parameters.
    return None if gradient is None else torch.zeros_like(gradient)


class CountTotals:
    """Totals of counts that are known only batch by batch (tokens), over one accumulation group of one model.

    The first batch's total times the number of batches stands in for the group's; once the last is known, the
    accumulated gradients are multiplied by `correction`.
    """

    def __init__(self, first_total: float, group_size: int) -> None:
        self.reference = max(first_total, 1.0) * group_size
        self._total = 0.0

    def add(self, global_count: float) -> None:
        """One more batch, with the count of all ranks together."""
        self._total += global_count

    @property
    def correction(self) -> float:
        """What the gradients have to be multiplied by after the group's last batch; 0 where nothing was counted."""
        return self.reference / self._total if self._total else 0.0
