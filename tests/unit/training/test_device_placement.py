# SPDX-License-Identifier: Apache-2.0
"""`ensure_on_device`: what moves, when, and what is refused. The meta device is the other one here.

What stays the same object on a GPU is tested in tests/gpu: torch makes new parameters on its way to the meta device.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot import DdpilotError, ensure_on_device


class Counting(nn.Linear):
    """Counts the moves that it is asked for."""

    moves = 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `Module.to`, which libraries override too."""
        type(self).moves += 1
        return super().to(*args, **kwargs)


@pytest.fixture
def counting() -> Counting:
    """A module that has not been moved."""
    Counting.moves = 0
    return Counting(2, 2)


def test_ensure_on_device_moves_once_and_returns_the_module(counting: Counting) -> None:
    """The second call finds it there."""
    assert ensure_on_device(counting, "meta") is counting
    assert ensure_on_device(counting, torch.device("meta")) is counting
    assert Counting.moves == 1
    assert {parameter.device.type for parameter in counting.parameters()} == {"meta"}


def test_ensure_on_device_does_nothing_on_the_cpu(counting: Counting) -> None:
    """Where a library's model starts, and for a module without tensors."""
    ensure_on_device(counting, "cpu")
    ensure_on_device(nn.ReLU(), "cuda")
    assert Counting.moves == 0


def test_ensure_on_device_moves_what_was_left_behind() -> None:
    """A layer or a buffer that was added after the first move."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    ensure_on_device(module, "meta")
    module.append(nn.Linear(2, 2, device="cpu"))
    module[1].register_buffer("mean", torch.zeros(2))
    ensure_on_device(module, "meta")
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}


def test_ensure_on_device_leaves_trainable_parameters_when_called_in_inference_mode() -> None:
    """`module.to` there makes tensors that no backward takes: a later fit would fail."""
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        ensure_on_device(module, "meta")
    assert not any(parameter.is_inference() for parameter in module.parameters())


def test_ensure_on_device_refuses_meta_tensors_before_it_moves_anything() -> None:
    """They have no values; the first is named, and what to do."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    told = r"moving Sequential to cuda:1: `1\.weight` and 1 more on the meta device, .*to_empty\(device=\"cuda:1\"\)"
    with pytest.raises(DdpilotError, match=told):
        ensure_on_device(module, "cuda:1")
    assert module[0].weight.device.type == "cpu"


def test_ensure_on_device_refuses_what_is_no_module() -> None:
    """A tensor cannot be moved in place."""
    with pytest.raises(DdpilotError, match=r"moving Tensor to cpu: `module` is a torch.Tensor, not a torch.nn.Module"):
        ensure_on_device(torch.ones(2), "cpu")  # type: ignore[type-var]


def test_ensure_on_device_moves_once_when_several_threads_ask(counting: Counting) -> None:
    """The others find it moved."""
    threads = [threading.Thread(target=ensure_on_device, args=(counting, "meta")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert Counting.moves == 1
