# SPDX-License-Identifier: Apache-2.0
"""What a loss function of a `Trainer` returns, and what the model and the loss are called by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ddpilot.errors import LoopError

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Of a model and a batch to (output, target): what the loss and the metrics are called with."""

_IGNORED = -100
"""The label that torch's cross entropy leaves out, and so transformers' models."""


class Summands(dict[str, Any]):
    """Losses by name, each a mean or (mean, count), of which the sum was trained on."""


def with_count(loss: Any) -> tuple[Any, float | None]:
    """What a loss function returned, as the loss and what its mean is over (None: samples)."""
    return (loss[0], float(loss[1])) if isinstance(loss, tuple) else (loss, None)


def check_attached(loss: Any, rank: int) -> None:
    """Raise LoopError for a loss that no parameter is behind."""
    if not getattr(loss, "requires_grad", False):
        what = f"a {type(loss).__name__}" if not isinstance(loss, torch.Tensor) else "a tensor without a gradient"
        raise LoopError(
            "training a batch",
            found=f"`loss_fn` returned {what}: nothing would be trained",
            fix="Return a tensor that is computed from the output, without `.detach()`, `.item()` or `no_grad`.",
            rank=rank,
        )


def check_weighted(loss: Any, output: Any, batch: Any, rank: int) -> None:
    """Raise LoopError for a loss of a transformers model, given without a count, that is not a mean over samples.

    Its own loss is a mean over the labels that are not -100, of which a rank's samples have more or fewer.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not _is_own_loss(loss, output):
        return
    num_counted = int((labels != _IGNORED).sum())
    if num_counted < labels.numel():
        counts = f"(batch['labels'] != {_IGNORED}).sum()"
        shifted = counts.replace("'labels']", "'labels'][:, 1:]")
        raise LoopError(
            "training a batch",
            found=f"`loss_fn` returned `output.loss`, which is a mean over the {num_counted} of {labels.numel()} "
            f"labels that are not {_IGNORED}; without that count it would be taken for a mean over {len(labels)} "
            "samples, and the numbers would be others on each number of ranks",
            fix=f"Return (output.loss, {counts}); of a causal language model, which shifts its labels, "
            f"(output.loss, {shifted}).",
            rank=rank,
        )


def _is_own_loss(loss: Any, output: Any) -> bool:
    """Is `loss`, or one of several, what a transformers model returned as its `loss`?"""
    is_theirs = any(base.__module__.partition(".")[0] == "transformers" for base in type(output).__mro__)
    given = loss.values() if isinstance(loss, Mapping) else [loss]
    return is_theirs and any(each is getattr(output, "loss", None) for each in given)
