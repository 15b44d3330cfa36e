# SPDX-License-Identifier: Apache-2.0
"""Scales the learning rate to a different batch size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Literal

from ddpilot.environments.detect import detect_topology
from ddpilot.errors import LoopError

Rule = Literal["linear", "sqrt"]

_SOURCES: dict[str, str] = {
    "linear": "the linear rule of Goyal et al. 2017, for SGD; warm up over the first epochs",
    "sqrt": "the square-root rule of Krizhevsky 2014, for Adam see Malladi et al. 2022",
}


def scale_lr(
    lr: float,
    global_batch_size: int,
    base_batch_size: int,
    rule: Rule = "linear",
    *,
    say: Callable[[str], object] | None = None,
) -> float:
    """Return the learning rate for `global_batch_size`, given `lr` for `base_batch_size`; reported on rank 0.

    Both sizes count the samples of all ranks in one update, including accumulated batches. More ranks with the same
    global batch do not need a different learning rate, so ddpilot never scales it automatically.

    "linear": multiply by the ratio, for SGD with a warm-up; it held up to 8,192 images (Goyal et al. 2017,
    arXiv:1706.02677). "sqrt": multiply by the square root of the ratio, which keeps the variance of an update
    (Krizhevsky 2014, arXiv:1404.5997), and for Adam and RMSProp follows from theory (Malladi et al. 2022,
    arXiv:2205.10287, which also multiplies 1 - beta by the ratio and divides epsilon by its square root).

    `say`: called with the message, on rank 0 only; default: print. Not collective. Raises LoopError for sizes below 1,
    a learning rate that is not positive and finite, and an unknown `rule`.
    """
    if rule not in _SOURCES:
        raise _refuse(f"`rule` is {rule!r}", "Use 'linear' or 'sqrt'.")
    if min(global_batch_size, base_batch_size) < 1:
        found = f"batch sizes of {global_batch_size} and {base_batch_size}"
        raise _refuse(found, "Give the samples of all ranks in one update, 1 or more.")
    if not (lr > 0 and math.isfinite(lr)):
        raise _refuse(f"`lr` is {lr}", "Give a positive learning rate.")
    ratio = global_batch_size / base_batch_size
    scaled = lr * (ratio if rule == "linear" else math.sqrt(ratio))
    if detect_topology(os.environ).rank == 0:
        (say or print)(
            f"learning rate {lr:g} for batches of {base_batch_size:,} becomes {scaled:.6g} for {global_batch_size:,} "
            f"({_SOURCES[rule]})"
        )
    return scaled


def _refuse(found: str, fix: str) -> LoopError:
    return LoopError("scaling the learning rate", found=found, fix=fix)
