# SPDX-License-Identifier: Apache-2.0
"""`ensure_on_device` between the CPU and a GPU: the same parameters, tied as before, for the same optimizer."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from ddpilot import ensure_on_device
from ddpilot.environments.nvml import count_accelerators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators(os.environ) == 0, reason="no NVIDIA device is visible to NVML here"),
]


def test_ensure_on_device_keeps_parameters_ties_and_the_optimizer() -> None:
    """To the device and back: identity, ties and gradients stay, and the optimizer's state can be brought along."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = list(module.parameters())
    assert ensure_on_device(module, "cuda") is module
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    assert module[1].weight is module[0].weight
    assert {tensor.device.type for tensor in before} == {"cuda"}
    assert ensure_on_device(module, before[0].device) is module
    optimizer.load_state_dict(optimizer.state_dict())
    module(torch.ones(1, 2, device=before[0].device)).sum().backward()
    optimizer.step()
    assert ensure_on_device(module, "cpu")[0].weight.device.type == "cpu"
