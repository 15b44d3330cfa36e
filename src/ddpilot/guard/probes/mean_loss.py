# SPDX-License-Identifier: Apache-2.0
"""Read from the autograd graph whether a loss is a mean, and what it was multiplied by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MEAN = 1
_UNREDUCED = 0
_ELEMENTWISE = ("PowBackward0", "AbsBackward0")


def find_unscaled(node: Any) -> tuple[Any, Tensor | None]:
    """If `node` multiplies a loss by one number, return the loss's node and the number; otherwise `node` and None.

    The number may be a GradScaler's or the program's: gradients at the step show whether they are divided by it again.
    """
    if node is None or node.name() != "MulBackward0":
        return node, None
    (inner, _), (other, _) = node.next_functions
    scale = node._saved_other
    is_scaled = inner is not None and other is None and scale is not None and scale.numel() == 1
    return (inner, scale.detach()) if is_scaled else (node, None)


def is_mean(node: Any) -> bool:
    """True if a loss function, or a mean of squares or absolute values, computed the loss at `node`."""
    if node is None:
        return False
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == _MEAN)
    if node.name() != "MeanBackward0":
        return False
    before = node.next_functions[0][0]
    if before is None:
        return False
    return before.name() in _ELEMENTWISE or getattr(before, "_saved_reduction", None) == _UNREDUCED
