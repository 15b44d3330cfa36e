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
from ddpilot.guard.probes.data import losses
from ddpilot.record.journal import read_journal

PROBES = ("ddpilot.guard.probes.data.probe:DataProbe",)


def noted() -> dict[str, list[list[Any]]]:
    """What was not finite and the line that is named for it, and up to which backward all was read.

    The device stands still for a step after its backward.
    """
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
        entries = read_journal(journal).entries
    bad = [entry.values for entry in entries if entry.kind == "not_finite"]
    return {
        "bad": [[values["loss"], linecache.getline(__file__, values["site"]["line"]).strip()] for values in bad],
        "checked": [[entry.values["backward"]] for entry in entries if entry.kind == "checked"],
    }


def left_out() -> dict[str, list[int]]:
    """The backwards of which not all was checked, as more values were in flight than are kept, and those checked."""
    losses._MAX_PENDING = 2
    weight = torch.nn.Parameter(torch.ones(2, device="emu"))
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        stop = install(journal, rank=0, probes=PROBES, report=_fail)
        release = sys.modules["emu_C"].hold_stream(0)
        for _ in range(4):
            weight.sum().backward()  # type: ignore[no-untyped-call]
        release()
        torch.accelerator.synchronize()
        weight.sum().backward()  # type: ignore[no-untyped-call]
        release = sys.modules["emu_C"].hold_stream(0)
        weight.sum().backward()  # type: ignore[no-untyped-call]
        stop()
        release()
        entries = read_journal(journal).entries
    return {
        kind: [entry.values["backward"] for entry in entries if entry.kind == kind] for kind in ("unchecked", "checked")
    }


def _fail(text: str) -> None:
    raise AssertionError(text)
