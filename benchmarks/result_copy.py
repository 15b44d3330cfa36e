# SPDX-License-Identifier: Apache-2.0
"""A 500 MB state dict from a rank to the notebook, against one copy of it into fresh memory.

Ours runs from the rank's `return` (its own clock reading travels along; the clock is the machine's) to the results, and
in the second row until every byte was read once. The peer is `clone()` of every tensor, then the same reading.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

import ddpilot
from benchmarks.measure import Row, main, render_values

NUM_TENSORS = 10
TENSOR_BYTES = 50_000_000
FACTOR = 1.5


def make_weights() -> dict[str, torch.Tensor]:
    """A state dict of 500 MB whose pages are really there."""
    return {f"layer{i}.weight": torch.full((TENSOR_BYTES // 4,), float(i)) for i in range(NUM_TENSORS)}


def return_weights() -> dict[str, Any]:
    """What the rank does; the clock is read last."""
    return {"weights": make_weights(), "time_s": time.monotonic()}


def read_every_byte(weights: dict[str, torch.Tensor]) -> None:
    """Touch all of it, and see that it is right."""
    for i, tensor in enumerate(weights.values()):
        assert tensor.min() == tensor.max() == i


def ours() -> tuple[float, float]:
    """Seconds to the results, and to having read them."""
    result = ddpilot.launch(return_weights, nproc_per_node=1)[0]
    arrived = time.monotonic()
    read_every_byte(result["weights"])
    return arrived - result["time_s"], time.monotonic() - result["time_s"]


def copy(weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds to a copy in fresh memory, and to having read it."""
    start = time.monotonic()
    copied = {name: tensor.clone() for name, tensor in weights.items()}
    arrived = time.monotonic()
    read_every_byte(copied)
    return arrived - start, time.monotonic() - start


def measure(rounds: int) -> list[Row]:
    """The bar, with and without reading."""
    ddpilot.launch(time.monotonic, nproc_per_node=1)
    weights = make_weights()
    pairs = [(ours(), copy(weights)) for _ in range(rounds)]
    rows = []
    for index, what in enumerate(("500 MB state dict returned", "500 MB state dict returned and read")):
        returned, copied = [pair[0][index] for pair in pairs], [pair[1][index] for pair in pairs]
        factor = statistics.median(returned) / statistics.median(copied)
        rows.append(
            Row(
                what=what,
                ours=render_values(returned),
                peer=f"clone {render_values(copied)}",
                ratio=f"{factor:.2f}",
                bar="at most 1.5",
                holds=factor <= FACTOR,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, rounds=7))
