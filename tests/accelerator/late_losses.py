# SPDX-License-Identifier: Apache-2.0
"""What guard notes of a loss that is read when its backward is long over."""

from __future__ import annotations

import linecache
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ddpilot.guard.hook import install
from ddpilot.record.journal import read_journal

PROBES = ("ddpilot.guard.probes.data.probe:DataProbe",)


def noted_lines() -> list[list[str]]:
    """What was not finite, and the line that is named for it; the device stands still for a step after its backward."""
    weight = torch.nn.Parameter(torch.ones(2, device="emu"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        stop = install(journal, rank=0, probes=PROBES, report=_fail)
        release = sys.modules["emu_C"].hold_stream(0)
        loss: Any = (weight * float("nan")).sum()
        loss.backward()  # the bad one
        optimizer.step()
        release()
        torch.accelerator.synchronize()
        optimizer.zero_grad()
        (torch.ones(1, requires_grad=True) * 2).sum().backward()  # type: ignore[no-untyped-call]
        stop()
        entries = [entry.values for entry in read_journal(journal).entries if entry.kind == "not_finite"]
    return [[values["loss"], linecache.getline(__file__, values["site"]["line"]).strip()] for values in entries]


def _fail(text: str) -> None:
    raise AssertionError(text)
