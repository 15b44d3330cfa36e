# SPDX-License-Identifier: Apache-2.0
"""What the rank of the tests of checkpoints on emulated accelerators runs; it has two."""

from __future__ import annotations

from pathlib import Path

import torch

from ddpilot.checkpoint.directory import CheckpointDir
from ddpilot.checkpoint.host_copy import HostCopy, Window
from ddpilot.checkpoint.manifest import RunProgress

WINDOWS = {"small": (1000, 3), "one slot": (64, 1), "default": (1 << 24, 8), "none": (1 << 60, 1)}
"""Bytes of a slot and number of slots; nothing can lock as much as the last one asks for."""


def occupy(device: torch.device, num_rounds: int = 30) -> None:
    """Queue work on `device`, behind which everything else waits."""
    large = torch.full((300, 300), 0.5, device=device)
    for _ in range(num_rounds):
        large = large @ large


def layouts(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of many sizes and kinds on `device`."""
    base = torch.randn(2, 3, 4, 5)
    kinds = {
        "large": torch.randn(70_001),
        "odd": torch.randn(333, dtype=torch.float64),
        "transposed": base.transpose(0, 1),
        "sliced": base[:, ::2],
        "expanded": torch.randn(1).expand(7),
        "channels last": base.to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(5, dtype=torch.bfloat16),
    }
    moved = {name: value.to(device) for name, value in kinds.items()}
    whole = torch.randn(6, 8).to(device)
    return {**moved, "part": whole[2:4], "tied": whole[2:4]}


def copy_each_layout() -> list[str]:
    """Names of what a copy got wrong, for each window, twice in the same memory, from two devices."""
    wrong = []
    for kind, (slot_bytes, num_slots) in WINDOWS.items():
        snapshots = HostCopy()
        snapshots._window = Window(slot_bytes, num_slots)
        for turn in (1, -1):
            tree = {f"emu:{index}": layouts(torch.device("emu", index)) for index in (0, 1)}
            expected = {
                place: {name: value.cpu() for name, value in tensors.items()} for place, tensors in tree.items()
            }
            taken = snapshots.take(dict([*tree.items()][::turn]))
            for place in tree:
                for name, value in expected[place].items():
                    copied = taken[place][name]
                    same = torch.equal(copied, value) and copied.device.type == "cpu" and copied.dtype == value.dtype
                    wrong += [] if same else [f"{kind} {turn} {place} {name}"]
                if taken[place]["part"] is not taken[place]["tied"]:
                    wrong.append(f"{kind}: tied")
    return wrong


def copy_while_devices_are_slow() -> tuple[bool, int]:
    """Whether a copy has what tensors of two slow devices held when it was taken, though they change right after."""
    torch.manual_seed(0)
    devices = [torch.device("emu", index) for index in (0, 1)]
    values = [torch.randn(50_000) for _ in devices]
    tensors = [value.to(device) for value, device in zip(values, devices, strict=True)]
    snapshots = HostCopy()
    num_wrong = 0
    for _ in range(5):
        for tensor, device in zip(tensors, devices, strict=True):
            occupy(device)
            tensor.add_(1.0)  # queued behind that
        taken = snapshots.take({"tensors": tensors})
        for tensor in tensors:
            tensor.fill_(-1.0)
        for copied, value in zip(taken["tensors"], values, strict=True):
            num_wrong += not torch.equal(copied, value + 1.0)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    return num_wrong == 0, num_wrong


def save_and_load(folder: Path) -> bool:
    """Whether what a directory gives back is what was on the device when it was saved, twice."""
    same = []
    with CheckpointDir(folder) as checkpoints:
        checkpoints.reserve(1 << 20)
        weight = torch.randn(1000, device="emu:1")
        for step in (1, 2):
            occupy(weight.device)
            weight.mul_(2.0)
            expected = weight.clone()
            checkpoints.save(RunProgress(step=step, epoch=0, batch=0), weights={"model": {"weight": weight}})
            weight.zero_()
            checkpoints.wait()
            found = checkpoints.latest()
            assert found is not None
            same.append(torch.equal(found.weights("model")["weight"], expected.cpu()))
    return all(same)
