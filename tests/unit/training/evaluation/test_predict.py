# SPDX-License-Identifier: Apache-2.0
"""Predictions that cannot be written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpilot import FakeGroup
from ddpilot.errors import LoopError
from ddpilot.training.loop import Loop


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process can become larger, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_predict_says_what_the_system_said_where_a_batch_cannot_be_written(tmp_path: Path) -> None:
    """With the file, and what to do; nothing is left there, and the room it took is free."""
    loop = Loop(group=FakeGroup(), progress=False)
    loader = loop.loader(TensorDataset(torch.ones(6, 1)), global_batch_size=3)
    with (
        largest_file(4 << 20),
        pytest.raises(LoopError, match=r"predicting into .*out: OSError: .*File too large") as caught,
    ):
        loop.predict(nn.Linear(1, 1), loader, to=tmp_path / "out", forward=lambda m, batch: torch.ones(3, 1 << 19))
    assert "on a disk with free space" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []
