# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that travel to the ranks."""

from __future__ import annotations

import random

import numpy
import torch

from ddpilot.integrations.lightning.global_state import GlobalState


def test_global_state_restores_settings_and_random_states() -> None:
    """What a cell has set, and where the three random generators were."""
    before = GlobalState.capture()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        taken = GlobalState.capture()
        drawn = random.random(), numpy.random.rand(), torch.rand(1)
    finally:
        before.restore()
    assert torch.get_float32_matmul_precision() != "medium"
    assert torch.get_default_dtype() == torch.float32
    try:
        taken.restore()
        assert torch.get_float32_matmul_precision() == "medium"
        assert (random.random(), numpy.random.rand(), torch.rand(1)) == drawn
    finally:
        before.restore()
