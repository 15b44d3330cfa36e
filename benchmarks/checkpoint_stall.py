# SPDX-License-Identifier: Apache-2.0
"""How long training stands still while a 400 MB model is saved: in the background, against `torch.save`.

Ours is the time until `CheckpointDir.save` returns; waiting until the former one is on the disk is not part of it,
training would go on meanwhile. The first save of a run, whose memory was reserved while the model was built, has a row
of its own. `torch.save` writes a new file each time, as a run does; it does not wait for the disk, ours does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.measure import Row, main, render_values, seconds
from ddpilot.training.checkpoint.directory import CheckpointDir
from ddpilot.training.checkpoint.manifest import Progress

NUM_TENSORS = 40
TENSOR_BYTES = 10_000_000
BAR = 0.2


def make_weights() -> dict[str, torch.Tensor]:
    """A state dict of 400 MB whose pages are really there."""
    return {f"layer{i}.weight": torch.full((TENSOR_BYTES // 4,), float(i)) for i in range(NUM_TENSORS)}


def first_save(weights: dict[str, torch.Tensor], folder: Path) -> float:
    """Seconds that the first save of a run stops training."""
    with CheckpointDir(folder, keep=1) as directory:
        directory.reserve(NUM_TENSORS * TENSOR_BYTES)
        directory.wait()
        return seconds(lambda: directory.save(Progress(step=0), weights={"model": weights}))


def later_save(weights: dict[str, torch.Tensor], directory: CheckpointDir, step: int) -> float:
    """Seconds that a further save stops training; the file is on the disk before the next is begun."""
    took = seconds(lambda: directory.save(Progress(step=step), weights={"model": weights}))
    assert directory.wait(), "the disk is full"
    return took


def peer_save(weights: dict[str, torch.Tensor], path: Path) -> float:
    """Seconds that `torch.save` stops training."""
    path.unlink(missing_ok=True)
    return seconds(lambda: torch.save(weights, path))


def make_row(what: str, ours: list[float], peer: list[float]) -> Row:
    """One line of the table."""
    ratio = statistics.median(ours) / statistics.median(peer)
    return Row(
        what=what,
        ours=render_values(ours),
        peer=f"torch.save {render_values(peer)}",
        ratio=f"{ratio:.2f}",
        bar=f"at most {BAR}",
        holds=ratio <= BAR,
    )


def measure(rounds: int) -> list[Row]:
    """First and later saves, in turn with `torch.save` of the same state dict into the same folder."""
    weights = make_weights()
    first, later, peer = [], [], []
    with tempfile.TemporaryDirectory() as name, CheckpointDir(Path(name) / "later", keep=1) as directory:
        later_save(weights, directory, 0)
        for step in range(1, rounds + 1):
            first.append(first_save(weights, Path(name) / "first"))
            later.append(later_save(weights, directory, step))
            peer.append(peer_save(weights, Path(name) / "peer.pt"))
    return [
        make_row("stall of saving 400 MB, first of a run", first, peer),
        make_row("stall of saving 400 MB, later", later, peer),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=5))
