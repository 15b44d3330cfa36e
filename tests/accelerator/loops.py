# SPDX-License-Identifier: Apache-2.0
"""Loops that the ranks of `test_loop.py` run: fp16, streams, and a save for which memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from ddpilot.checkpoint.host_copy import Window
from ddpilot.errors import CheckpointError
from ddpilot.training.loop import Loop

WARM_UP, NUM_COUNTED = 8, 12


class Two(nn.Module):
    """Two numbers, whose gradients are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b)


def step_two_in_fp16(clips: bool) -> dict[str, Any]:
    """Weights of two optimizers that step on the gradients of one backward, and the host's waits by kind."""
    loop = Loop(precision="fp16", progress=False)
    assert loop._precision.scaler is not None
    loop._precision.scaler.set_growth_interval(1)
    loop._precision.scaler._init_scale = 1024.0
    net = loop.prepare(Two())
    optimizers = [loop.prepare(torch.optim.SGD([each], lr=0.1)) for each in net.parameters()]
    loader = loop.loader(TensorDataset(torch.ones(2, 1)), global_batch_size=2)
    counted: dict[str, int] = {}
    for (x,) in loop.batches(loader):
        device: Any = torch.get_device_module("emu")
        with loop.accumulate(net):
            loop.backward(net(x).float().mean())
        if clips:
            loop.clip_grad_norm_(net.parameters(), 1.0)
        device.reset_host_syncs()
        for optimizer in optimizers:
            loop.step(optimizer)
        counted = {kind: num for kind, num in device.host_syncs().items() if num}
    return {"weights": [round(each.item(), 4) for each in net.parameters()], "waits": counted}


def step_two_both_ways() -> list[dict[str, Any]]:
    """Not clipped, and clipped."""
    return [step_two_in_fp16(clips) for clips in (False, True)]


class Rows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that can only be gone over; every rank sees all of them."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(8 * (WARM_UP + NUM_COUNTED + 2)):
            yield torch.full((4,), number / 100), torch.tensor(number % 3)


def count_waits_with_a_stream() -> dict[str, int]:
    """The host's waits in steps on a stream, of which the ranks exchange what they have seen."""
    loop = Loop(seed=1, progress=True)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    loader = loop.loader(Rows(), global_batch_size=8, pin_memory=True)
    device: Any = torch.get_device_module("emu")
    counted: dict[str, int] = {}
    for number, (x, y) in enumerate(loop.batches(loader)):
        if number == WARM_UP:
            device.reset_host_syncs()
        if number == WARM_UP + NUM_COUNTED:
            counted = device.host_syncs()
        with loop.accumulate(model):
            loop.backward(nn.functional.cross_entropy(model(x), y))
        loop.step(optimizer)
    return {kind: num for kind, num in counted.items() if num}


def save_without_memory(folder: Path) -> tuple[int, str]:
    """Saves without memory that is locked, then one in which rank 0's device fails; what this rank is told, and when.

    The number of the batch that it was at.
    """
    loop = Loop(checkpoint_dir=folder, progress=False)
    model = nn.Linear(4, 3)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = loop.loader(TensorDataset(torch.ones(64, 4)), global_batch_size=8)
    number = -1
    try:
        for number, (x,) in enumerate(loop.batches(loader)):
            with loop.accumulate(model):
                loop.backward(model(x).square().mean())
            loop.step(optimizer)
            if loop.rank == 0 and number == 0:
                Window._add_slot = _refuse_to_lock  # type: ignore[method-assign,assignment]
            if loop.rank == 0 and number == 4:
                Window.copy = _fail  # type: ignore[method-assign,assignment]
            if number in (2, 4):
                loop.save()
    except CheckpointError as error:
        return number, f"{error.did}: {error.found}"
    return number, "saved"


def _refuse_to_lock(_: Window) -> bool:
    return False


def _fail(_: Window, pairs: list[Any]) -> None:
    if pairs:
        raise torch.AcceleratorError("emu error: an illegal memory access was encountered")
