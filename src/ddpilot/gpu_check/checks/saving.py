# SPDX-License-Identifier: Apache-2.0
"""Check checkpoints from device memory: they hold the state at the save, and training hardly waits."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot.gpu_check.check import CannotBeShownError, Outcome, judge
from ddpilot.gpu_check.checks.accelerator import accelerator_kind, count_devices, first_device, wait_for
from ddpilot.group.fake import FakeGroup
from ddpilot.training.loop import Loop

_NUM_TENSORS, _TENSOR_BYTES = 40, 10_000_000
_NUM_SAVES = 5
_STALL_BAR = 0.2
_NUM_STEPS = 6


def checkpoint_stall() -> Outcome:
    """While 400 MB are saved from the device, training stops for at most a fifth of the time of torch.save."""
    device = first_device()
    tensors = [torch.full((_TENSOR_BYTES // 4,), float(number), device=device) for number in range(_NUM_TENSORS)]
    model = nn.ParameterList([nn.Parameter(values, requires_grad=False) for values in tensors])
    with tempfile.TemporaryDirectory() as name:
        loop = Loop(group=FakeGroup(device=device), checkpoint_dir=Path(name) / "ours", keep=1, progress=False)
        loop.track(model=model)
        loader = loop.loader(TensorDataset(torch.ones(100, 1)), global_batch_size=1)
        batches = loop.batches(loader)
        next(batches)
        next(batches)  # after the first update, when memory is reserved
        ours, theirs = [], []
        for number in range(_NUM_SAVES + 1):
            wait_for(device)
            loop.save()
            ours.append(_seconds_of_next(batches))
            loop._keeper.wait()
            theirs.append(_seconds_of_torch(model, Path(name) / f"{number}.pt"))
        del batches
    first, later, peer = ours[0], statistics.median(ours[1:]), statistics.median(theirs)
    evidence = (
        f"first save {first * 1e3:.0f} ms, later ones {later * 1e3:.0f} ms, torch.save {peer * 1e3:.0f} ms; "
        f"ratio {later / peer:.3f}, bar {_STALL_BAR}"
    )
    return judge(later / peer <= _STALL_BAR, evidence)


def _seconds_of_next(batches: Iterator[Any]) -> float:
    began = time.perf_counter()
    next(batches)
    return time.perf_counter() - began


def _seconds_of_torch(model: nn.Module, path: Path) -> float:
    began = time.perf_counter()
    torch.save(model.state_dict(), path)
    took_s = time.perf_counter() - began
    path.unlink()
    return took_s


def checkpoint_is_of_its_moment() -> Outcome:
    """The values loaded are those at the save, although the next updates ran immediately."""
    return _save_while_training([first_device()])


def checkpoint_of_two_devices() -> Outcome:
    """The values loaded are those at the save, for a model whose layers are on two devices."""
    kind = accelerator_kind()
    if count_devices() < 2:
        raise CannotBeShownError(
            f"it takes 2 devices, and there {'is' if count_devices() == 1 else 'are'} {count_devices()}"
        )
    return _save_while_training([torch.device(kind, 0), torch.device(kind, 1)])


def _save_while_training(devices: list[torch.device]) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        loop = Loop(group=FakeGroup(device=devices[0]), checkpoint_dir=name, progress=False)
        model = _make_counters(devices)
        loop.track(model=model)
        loader = loop.loader(TensorDataset(torch.ones(_NUM_STEPS + 1, 1)), global_batch_size=1)
        for number, _ in enumerate(loop.batches(loader)):
            with torch.no_grad():
                for each in model:
                    each.fill_(number)
            if number == _NUM_STEPS - 2:
                loop.save()
        loop._keeper.wait()
        again = Loop(group=FakeGroup(device=devices[0]), checkpoint_dir=name, progress=False)
        loaded = _make_counters(devices)
        again.track(model=loaded)
        is_there = again.resume()
        found = sorted({value for each in loaded for value in each.unique().tolist()})
    evidence = f"on {', '.join(map(str, devices))}: saved at {_NUM_STEPS - 2}, loaded {found}; resumed: {is_there}"
    return judge(is_there and found == [_NUM_STEPS - 2], evidence)


def _make_counters(devices: list[torch.device]) -> nn.ParameterList:
    values = [torch.full((8_000_000,), -1.0, device=device) for device in devices for _ in range(4)]
    return nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in values])
