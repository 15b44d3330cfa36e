# SPDX-License-Identifier: Apache-2.0
"""How far losses, weights and a validation metric at 2 and 4 ranks are from those of one, in float64.

ddpilot, and Accelerate and Fabric in their default settings and in those that bring them closest, each compared with
itself on one rank: 200 updates with a ragged last batch in each epoch (which the closest settings drop), accumulation 3
and clipping, ddpilot with unequal shares as well. The figures are the largest relative differences: of a batch's loss,
of a weight tensor (by norms), of the metric.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measure import Row, main
from benchmarks.same_training import Learnt, train_with_accelerate, train_with_fabric, train_with_loop
from ddpilot.launcher import Launcher

KINDS = ("mlp", "cnn", "gpt")
WORLD_SIZES = (1, 2, 4)
NUM_EPOCHS = 50
NUM_UPDATES = 200
BAR = 1e-10
SHARES = {2: [2.0, 1.0], 4: [3.0, 1.0, 2.0, 1.0]}
SHIMS = Path(__file__).parents[1] / "tests" / "notebook" / "shims"
"""Lightning imports torchvision, which a torch for the CPU cannot always load."""

Key = tuple[str, bool, int]
"""Kind of model, shuffled, number of ranks."""

LIBRARIES: dict[str, Callable[..., Learnt]] = {
    "ddpilot": functools.partial(train_with_loop, batch_split=SHARES),
    "Accelerate": train_with_accelerate,
    "Accelerate, closest": functools.partial(train_with_accelerate, is_closest=True),
    "Fabric": train_with_fabric,
    "Fabric, closest": functools.partial(train_with_fabric, is_closest=True),
}


def train_all(train: Callable[..., Learnt]) -> dict[tuple[str, bool], Learnt]:
    """Each kind of model, with the order of the dataset and with the library's shuffling. Runs on every rank."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # more of them would only wait for each other, on tensors of this size
    return {(kind, shuffle): train(kind, NUM_EPOCHS, shuffle) for kind in KINDS for shuffle in (True, False)}


def difference(seen: Learnt, expected: Learnt) -> list[float]:
    """The largest relative differences of losses, weights and metric; infinite where the numbers of losses differ."""

    def relative(one: float, two: float) -> float:
        return abs(one - two) / abs(two)

    are_paired = len(seen["losses"]) == len(expected["losses"])
    losses = map(relative, seen["losses"], expected["losses"]) if are_paired else [float("inf")]
    weights = ((seen["weights"][n] - w).norm().item() / w.norm().item() for n, w in expected["weights"].items())
    return [max(losses), max(weights), relative(seen["metric"], expected["metric"])]


def compare(train: Callable[..., Learnt]) -> dict[Key, list[float]]:
    """For each kind of model, order and number of ranks: how far the farthest rank is from one rank alone."""
    learnt = {}
    for num in WORLD_SIZES:
        launcher = Launcher(nproc_per_node=num, timeout_s=900, env={"PYTHONPATH": str(SHIMS)}, output="silent")
        learnt[num] = launcher.run(train_all, train)
    found = {}
    for num in WORLD_SIZES[1:]:
        for (kind, shuffle), expected in learnt[1][0].items():
            each = [difference(result[kind, shuffle], expected) for result in learnt[num]]
            found[kind, shuffle, num] = [max(values) for values in zip(*each, strict=True)]
    return found


def render(values: Sequence[float]) -> str:
    """Such as ``3e-15 / 2e-14 / 0``."""
    return " / ".join(f"{value:.0e}".replace("0e+00", "0") for value in values)


def make_row(kind: str, shuffle: bool, num: int, found: dict[str, dict[Key, list[float]]]) -> Row:
    """One line of the table."""
    ours, *peers = (render(found[name][kind, shuffle, num]) for name in LIBRARIES)
    order = "shuffled" if shuffle else "in order"
    return Row(
        what=f"losses / weights / metric of {num} ranks against 1, float64, {kind}, {order}",
        ours=ours,
        peer=", ".join(f"{name} {value}" for name, value in zip(list(LIBRARIES)[1:], peers, strict=True)),
        ratio="",
        bar=f"at most {BAR:.0e}",
        holds=max(found["ddpilot"][kind, shuffle, num]) <= BAR,
    )


def measure(_rounds: int) -> list[Row]:
    """Nothing here depends on the machine's speed: one round says it all."""
    found = {name: compare(train) for name, train in LIBRARIES.items()}
    keys = [(kind, shuffle, num) for shuffle in (True, False) for kind in KINDS for num in WORLD_SIZES[1:]]
    return [make_row(*key, found) for key in keys]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=1))
