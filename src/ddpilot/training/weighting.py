# SPDX-License-Identifier: Apache-2.0
"""What a rank's mean loss has to be multiplied by, so that DDP's mean over ranks is the mean over all samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def backward_weighted(
    loss: torch.Tensor,
    seed: torch.Tensor | float | None,
    models: Iterable[torch.nn.Module],
    *,
    retain_graph: bool = False,
) -> None:
    """Add the gradient of `seed` times `loss`, a scalar; without a `seed` add exact zeros, whatever `loss` is.

    DDP waits for every rank, so a rank without samples runs through its graph too; but the mean of no samples is NaN,
    and so is zero times NaN. `models`: all that the graph may reach, only needed for that.
    """
    if seed is not None:
        if not isinstance(seed, torch.Tensor):  # one is what torch begins with by itself, at less cost
            seed = None if seed == 1.0 else torch.full_like(loss, seed, requires_grad=False)
        loss.backward(seed, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    # Leaf hooks run before a gradient is accumulated and before DDP sees it.
    trained = (parameter for model in models for parameter in model.parameters() if parameter.requires_grad)
    hooks = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        loss.backward(torch.zeros_like(loss), retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()


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
