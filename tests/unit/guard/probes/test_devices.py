# SPDX-License-Identifier: Apache-2.0
"""Errors about tensors on several devices, with the meta device instead of a GPU."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpilot.guard.hook import install
from ddpilot.record.journal import read_journal


class Masked(nn.Module):
    """Its mask is not a buffer, and does not move with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.ones(4, device="meta")

    def forward(self, x: torch.Tensor) -> Any:
        """As written everywhere."""
        hidden = self.linear(x)
        return hidden * self.mask


def forget_the_mask() -> None:
    """In the model."""
    Masked()(torch.ones(2, 4))


def forget_the_target() -> None:
    """In the loss."""
    output, target = torch.ones(2, 4), torch.ones(2, 4, device="meta")
    nn.functional.mse_loss(output, target)


def forget_the_weights() -> None:
    """Of the classes."""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4, device="meta"))
    output, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    criterion(output, target)


def forget_the_scale() -> None:
    """Of the result of a method."""
    logits, scale = torch.ones(2, 4), torch.ones(4, device="meta")
    print(logits.log_softmax(-1) * scale)


def divide_by_zero() -> None:
    """A different error."""
    print(1 / 0)


@pytest.mark.usefixtures("compiler_is_loaded")
@pytest.mark.parametrize(
    ("program", "found"),
    [
        (forget_the_mask, {"cpu": ["hidden"], "meta": ["self.mask"]}),
        (forget_the_target, {"cpu": ["output"], "meta": ["target"]}),
        (forget_the_weights, {"cpu": ["output", "target"], "meta": ["criterion (1 tensor)"]}),
        (forget_the_scale, {"cpu": ["logits"], "meta": ["scale"]}),
        (divide_by_zero, None),
    ],
)
def test_tensors_of_the_failing_line_are_named(
    tmp_path: Path, program: Callable[[], None], found: dict[str, list[str]] | None
) -> None:
    """Once, with the line, however often the exception is formatted; not for other errors."""
    hook = sys.excepthook
    stop = install(tmp_path / "j", rank=0, probes=("ddpilot.guard.probes.devices:DeviceErrorProbe",))
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        program()
    for _ in range(2):
        traceback.TracebackException.from_exception(caught.value)
    stop()
    assert sys.excepthook is hook
    entries = [entry.values for entry in read_journal(tmp_path / "j").entries]
    assert [values["by_device"] for values in entries] == ([found] if found else [])
    for values in entries:
        assert values["site"]["file"] == __file__
        assert all(name.partition(" ")[0] in values["site"]["text"] for names in found.values() for name in names)  # type: ignore[union-attr]
