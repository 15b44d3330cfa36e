# SPDX-License-Identifier: Apache-2.0
"""Checks for optimizers that call a closure, such as LBFGS: which options they work with."""

from __future__ import annotations

from torch.optim import Optimizer

from ddpilot.errors import LoopError
from ddpilot.training.models.optimizers import Divided

_DID = "updating the weights with a closure"


def check_closure(optimizer: Optimizer, accumulation: int, is_fp16: bool, rank: int) -> None:
    """Raise LoopError for options that a closure does not support. Not collective; the same on every rank.

    These are accumulation over several batches, fp16 and an optimizer whose state is sharded.
    """
    if accumulation > 1:
        found = f"`accumulate` is {accumulation}, and a closure computes the loss of one batch"
        raise LoopError(_DID, found=found, fix="Use Loop(accumulate=1) with larger batches.", rank=rank)
    if is_fp16:
        found = "`precision` is 'fp16', whose gradients are scaled while the optimizer looks at them"
        raise LoopError(_DID, found=found, fix="Use Loop(precision='bf16') or 'fp32'.", rank=rank)
    if isinstance(optimizer, Divided):
        found = "the state of the optimizer is divided among ranks, each of which would step by itself"
        raise LoopError(_DID, found=found, fix='Prepare it without shard="optimizer".', rank=rank)


def needs_closure(optimizer: Optimizer, rank: int) -> LoopError:
    """Return the error for an optimizer whose `step` requires a closure and got none."""
    return LoopError(
        "updating the weights",
        found=f"{type(optimizer).__name__} computes the loss by itself and was given no closure",
        fix="Write loop.step(optimizer, closure=closure), with a function that runs forward and loop.backward(loss).",
        rank=rank,
    )
