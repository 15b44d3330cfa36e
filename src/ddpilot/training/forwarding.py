# SPDX-License-Identifier: Apache-2.0
"""What a model is called with for a batch of the usual kinds, and what its output is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.errors import LoopError


def forward_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """(output, target) of a batch. LoopError where it has no target.

    `(x, y)`: `model(x)` and y; with more items, all but the last go to the model. A mapping: `model(**batch)` and the
    batch itself, as libraries write it whose models return their own loss.
    """
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return model(*batch[:-1]), batch[-1]
    raise LoopError(
        "running the model on a batch",
        found=f"it is a {type(batch).__name__}{' of one item' * isinstance(batch, list | tuple)}: there is no target",
        fix="Pass `forward=lambda model, batch: (output, target)`.",
    )


def predict_batch(model: nn.Module, batch: Any) -> Any:
    """The output for a batch, as `forward_batch` finds it; without a target, the model is called with all of it."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return model(batch[0])
    return forward_batch(model, batch)[0] if isinstance(batch, list | tuple | Mapping) else model(batch)
