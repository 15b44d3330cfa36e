# SPDX-License-Identifier: Apache-2.0
"""How long training stands still while a 400 MB model is saved: in the background, against `torch.save`.

Ours is the time from the end of a batch with `loop.save()` until the next batch is there, in a `Loop` on one rank;
waiting until the former checkpoint is on the disk is not part of it, training would go on meanwhile. The first save of
a run, whose memory was reserved after the first update, has a row of its own. `torch.save` writes a new file each time,
as a run does; it does not wait for the disk, ours does. A ratio is that of two saves of one round, each round in
another order, and what is said of it is the median of all rounds. Copying takes 0.05 s of processor time, a quarter of
what `torch.save` takes, and is divided among the free cores: where none is to spare, the ratio is that quarter.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.measure import Row, main, render_ratio, render_values, seconds
from ddpilot.training.loop import Loop

NUM_TENSORS = 40
TENSOR_BYTES = 10_000_000
BAR = 0.2


def make_model() -> nn.Module:
    """A model of 400 MB whose pages are really there; its parameters are not used."""
    parameters = [torch.full((TENSOR_BYTES // 4,), float(i)) for i in range(NUM_TENSORS)]
    return nn.ParameterList([nn.Parameter(values, requires_grad=False) for values in parameters])


class Training:
    """A loop in the middle of its epoch, with the memory for copies reserved."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.loop = Loop(checkpoint_dir=folder, keep=1, progress=False)
        self.loop.track(model=model)
        self.batches = iter(
            self.loop.batches(self.loop.loader(TensorDataset(torch.ones(1000, 1)), global_batch_size=1))
        )
        next(self.batches)
        next(self.batches)  # after the first update
        self.finish()

    def finish(self) -> None:
        """Wait until nothing is being written."""
        assert self.loop._checkpointer.wait(), "the disk is full"

    def save(self) -> float:
        """Seconds that a save stops training; it is on the disk before this returns."""
        self.loop.save()
        took = seconds(lambda: next(self.batches))
        self.finish()
        return took


def save_first(model: nn.Module, folder: Path) -> float:
    """Seconds that the first save of a run stops training."""
    took = Training(model, folder).save()
    shutil.rmtree(folder)
    return took


def peer_save(weights: Mapping[str, torch.Tensor], path: Path) -> float:
    """Seconds that `torch.save` stops training."""
    path.unlink(missing_ok=True)
    return seconds(lambda: torch.save(weights, path))


def make_row(what: str, ours: list[float], peer: list[float]) -> Row:
    """One line of the table."""
    ratios = [mine / other for mine, other in zip(ours, peer, strict=True)]
    return Row(
        what=what,
        ours=render_values(ours),
        peer=f"torch.save {render_values(peer)}",
        ratio=render_ratio(ratios),
        bar=f"at most {BAR}",
        holds=statistics.median(ratios) <= BAR,
    )


def measure(rounds: int) -> list[Row]:
    """First and later saves, in turn with `torch.save` of the same state dict into the same folder."""
    model = make_model()
    first: list[float] = []
    later: list[float] = []
    peer: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        training = Training(model, Path(name) / "later")
        training.save()
        turns: list[Callable[[], None]] = [
            lambda: first.append(save_first(model, Path(name) / "first")),
            lambda: later.append(training.save()),
            lambda: peer.append(peer_save(model.state_dict(), Path(name) / "peer.pt")),
        ]
        for _ in range(rounds):
            for turn in turns:
                turn()
            turns = [*turns[1:], turns[0]]
    return [
        make_row("stall of saving 400 MB, first of a run", first, peer),
        make_row("stall of saving 400 MB, later", later, peer),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, rounds=12))
