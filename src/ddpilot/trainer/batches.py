# SPDX-License-Identifier: Apache-2.0
"""Check and unpack what the loss function of a `Trainer` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ddpilot.errors import LoopError

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Takes a model and a batch, and returns (output, target), the arguments of loss and metrics."""

_IGNORED = -100
"""The label that torch's cross entropy, and therefore transformers' models, ignore."""


class Summands(dict[str, Any]):
    """Losses by name, each a mean or (mean, count), whose sum is trained on."""


def with_count(loss: Any) -> tuple[Any, float | None]:
    """Split what a loss function returned into the loss and what its mean is over (None: samples)."""
    return (loss[0], float(loss[1])) if isinstance(loss, tuple) else (loss, None)


def check_attached(loss: Any, rank: int) -> None:
    """Raise LoopError for a loss that does not require gradients."""
    if not getattr(loss, "requires_grad", False):
        what = f"a {type(loss).__name__}" if not isinstance(loss, torch.Tensor) else "a tensor without a gradient"
        raise LoopError(
            "training a batch",
            found=f"`loss_fn` returned {what}: nothing would be trained",
            fix="Return a tensor that is computed from the output, without `.detach()`, `.item()` or `no_grad`.",
            rank=rank,
        )


def check_weighted(loss: Any, output: Any, batch: Any, rank: int) -> None:
    """Raise LoopError for a transformers model's own loss without a count if it is not a mean over samples.

    That loss is a mean over the labels that are not -100, whose number differs between ranks with equally many samples.
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
    """True if `loss`, or one of several, is the `loss` of a transformers model's output."""
    is_theirs = any(base.__module__.partition(".")[0] == "transformers" for base in type(output).__mro__)
    given = loss.values() if isinstance(loss, Mapping) else [loss]
    return is_theirs and any(each is getattr(output, "loss", None) for each in given)
