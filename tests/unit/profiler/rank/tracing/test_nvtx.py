# SPDX-License-Identifier: Apache-2.0
"""Which ranges the phases of an update are marked with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddpilot.guard.hook import install
from ddpilot.profiler.rank.tracing.nvtx import NvtxProbe


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed environment variable, which torch's optimizers would set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")


def run(folder: Path, probe: NvtxProbe) -> None:
    """One update, and an evaluation."""

    def make() -> NvtxProbe:
        return probe

    reported: list[str] = []
    make.name = probe.name  # type: ignore[attr-defined]
    stop = install(folder / "journal", rank=0, probes=(make,), report=reported.append)
    try:
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(2, 3)), batch_size=2):
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(x)
    finally:
        stop()
    assert not reported


def test_each_phase_is_one_range(tmp_path: Path) -> None:
    """Of nested modules the outermost; every range is closed."""
    marks: list[str] = []
    run(tmp_path, NvtxProbe(marks.append, lambda: marks.append(")")))
    assert marks == ["data", ")", "forward", ")", "backward", ")", "optimizer", ")", "data", ")", "evaluation", ")"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once, and the program runs."""
    run(tmp_path, NvtxProbe())
    assert capfd.readouterr().err == "ddpilot: --nvtx: there is no CUDA device, so that no ranges are marked\n"
