# SPDX-License-Identifier: Apache-2.0
"""Find a call past the DDP wrapper if the function that made it has returned before backward."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters import bypass
from ddpilot.guard.probes.parameters.bypass import BypassCalls
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.journal import JournalWriter


class Inner(nn.Module):
    """A model with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: torch.Tensor) -> Any:
        """One layer."""
        return self.layer(batch)

    def loss(self, batch: torch.Tensor) -> Any:
        """A method that calls forward."""
        return self(batch).sum()


class Wrapper(DistributedDataParallel):
    """The part of DDP that these tests need."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DDP's."""
        return self.module(*inputs, **kwargs)


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[BypassCalls]:
    """For one model."""
    journal = JournalWriter(tmp_path / "j", rank=0)
    finder = SiteFinder(os.path.dirname(torch.__file__))
    yield BypassCalls(Notes("any", journal, rank=0, finder=finder, report=print))
    journal.close()


def compute_loss(wrapper: Wrapper) -> Any:
    """An object of a different module."""
    inner = wrapper.module
    return inner.loss(torch.ones(1, 2))  # here


def line_of(mark: str) -> int:
    """Of this file, from 1."""
    return next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(mark))


def test_the_next_call_is_waited_for(calls: BypassCalls) -> None:
    """Not one through DDP or without gradients; hooks are removed after the call."""
    inner = Inner()
    wrapper = Wrapper(inner)
    assert calls.find(wrapper)["function"] == "test_the_next_call_is_waited_for"
    wrapper(torch.ones(1, 2))
    with torch.no_grad():
        compute_loss(wrapper)
    assert inner._forward_pre_hooks
    compute_loss(wrapper)
    found = calls.find(wrapper)
    assert (found["function"], found["line"]) == ("compute_loss", line_of("# here"))
    assert not inner._forward_pre_hooks
    assert not inner.layer._forward_pre_hooks


def test_hooks_do_not_stay_for_ever(calls: BypassCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was the only such call."""
    monkeypatch.setattr(bypass, "_MAX_LOOKS", 4)
    inner = Inner()
    wrapper = Wrapper(inner)
    calls.find(wrapper)
    for _ in range(3):
        wrapper(torch.ones(1, 2))
    assert not inner._forward_pre_hooks


def test_a_compiled_model_gets_no_hooks(calls: BypassCalls) -> None:
    """Hooks would cause a recompilation."""
    inner = Inner()
    inner.layer._orig_mod = None  # type: ignore[assignment]
    calls.find(Wrapper(inner))
    assert not inner._forward_pre_hooks


def test_the_source_of_a_line_is_read_once(calls: BypassCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of steps."""
    read: list[FrameType] = []
    monkeypatch.setattr(bypass, "find_bypass_line", lambda frame, _: read.append(frame))
    wrapper = Wrapper(Inner())
    for _ in range(3):
        calls.find(wrapper)
    assert [frame.f_code for frame in read] == [sys._getframe().f_code]
