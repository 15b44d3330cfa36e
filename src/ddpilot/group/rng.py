# SPDX-License-Identifier: Apache-2.0
"""Captures and restores the random states of Python, numpy, and torch on CPU and accelerator, as plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpilot.group.accelerator import rng_state, runs_behind, set_rng_state


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the current states as numbers and tensors, which load without executing code.

    `device`: this rank's; the state of its generator is included, under its type ("cuda"), if it has one.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device is not None and runs_behind(device):
        states[device.type] = rng_state(device)
    return states


def restore_rng(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states that `capture_rng` returned; `device`: this rank's.

    The state of an accelerator is skipped on a rank whose device has a different type.
    """
    random.setstate(states["python"])
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device is not None and runs_behind(device) and device.type in states:
        set_rng_state(states[device.type], device)
