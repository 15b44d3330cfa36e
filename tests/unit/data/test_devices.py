# SPDX-License-Identifier: Apache-2.0
"""Batches of any structure on a device. The meta device stands for one that is not the CPU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddpilot.data.batches import to_device


class Pair(NamedTuple):
    """A batch."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Item:
    """A batch."""

    x: torch.Tensor
    name: str


class Encoding:
    """As tokenizers make them: `.to` takes the device and nothing else."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> Encoding:
        self.device = torch.device(device)
        return self


def test_to_device_moves_tensors_in_any_structure() -> None:
    """Containers keep their class, and what is no tensor stays."""
    x = torch.zeros(2)
    batch = {"pair": Pair(x, [x, "a"]), "item": Item(x, "b"), "own": Encoding(), "map": OrderedDict(x=(x, None, 3))}
    moved = to_device(batch, "meta")
    pair, item, own, mapping = moved["pair"], moved["item"], moved["own"], moved["map"]
    tensors = [pair.x, pair.y[0], item.x, mapping["x"][0]]
    assert [tensor.device.type for tensor in (*tensors, own)] == ["meta"] * 5
    assert (type(pair), type(item), type(mapping)) == (Pair, Item, OrderedDict)
    assert (pair.y[1], item.name, mapping["x"][1:]) == ("a", "b", (None, 3))
    assert batch["pair"].x.device.type == batch["item"].x.device.type == "cpu"  # type: ignore[attr-defined]


def test_to_device_leaves_a_tensor_where_it_is() -> None:
    """What is on the device already is not copied."""
    x = torch.zeros(2)
    assert to_device((x,), torch.device("cpu"))[0] is x
