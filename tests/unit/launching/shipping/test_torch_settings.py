# SPDX-License-Identifier: Apache-2.0
"""Torch settings and random states that a launch copies to its ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from ddpilot.launching.shipping.torch_settings import OnRank, TorchSettings


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TorchSettings]:
    """The settings of this process, which are restored."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # set by the compiler, which determinism imports
    before = TorchSettings.capture(with_random=True)
    yield before
    before.apply()


def draw() -> tuple[float, float, float]:
    """Draw from each generator."""
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_apply_sets_dtype_determinism_and_precision(original: TorchSettings) -> None:
    """The random states are kept if they were not captured."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    changed = TorchSettings.capture()
    original.apply()
    assert torch.get_default_dtype() == original.default_dtype
    first = draw()
    changed.apply()
    assert TorchSettings.capture() == changed
    assert torch.ones(1).dtype == torch.float64
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert draw() != first


def test_on_rank_calls_with_the_settings_of_its_creator(original: TorchSettings) -> None:
    """Random states are set too if requested; errors show the label."""
    draw()
    torch.set_float32_matmul_precision("medium")
    function = OnRank(draw, "Trainer.fit", with_random=True)
    drawn = draw()
    original.apply()
    assert function() == drawn
    assert torch.get_float32_matmul_precision() == "medium"
    assert function.__qualname__ == "Trainer.fit"
