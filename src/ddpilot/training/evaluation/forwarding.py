# SPDX-License-Identifier: Apache-2.0
"""Default forward functions: how a model is called with a batch, and which part of the batch is the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpilot.errors import LoopError


def forward_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return (output, target) for a batch. Raises LoopError if it has no target.

    For a tuple `(*inputs, target)`: `model(*inputs)` and the target. For a mapping: `model(**batch)` and the batch
    itself, for models that return their own loss.
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
    """Return the output for a batch, as `forward_batch` does; a batch without a target is passed to the model whole."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return model(batch[0])
    return forward_batch(model, batch)[0] if isinstance(batch, list | tuple | Mapping) else model(batch)
